"""Encodings of texts: found by byte order mark, by form or by statistics, and turned into UTF-8."""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tgen.corpus.sources import Source
from tgen.corpus.steps import Steps, as_part
from tgen.documents.kinds import byte_order_mark

_BLOCK = 1 << 18  # bytes per read
_HEAD = 1 << 16  # bytes that show a form
_MIXED = 200  # bytes from a character of UTF-8 to bytes that are not, in no other encoding
_SAMPLE = 1 << 18  # bytes for statistics
_MIN_SAMPLE = 32  # bytes that can make sure of an encoding
_MIN_CONFIDENCE = 0.1  # below it, one of ten guesses on short samples is wrong
_LONG, _MIN_OF_LONG = 1000, 0.05  # bytes, and the same for samples of as many
# Encodings that have all characters of others at the same codes, and more.
_EXTENDED = {
    "ascii": "utf-8",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "gb2312": "gb18030",
    "gbk": "gb18030",
}
_ESCAPES = {  # of encodings whose bytes are ASCII
    "iso2022_jp": re.compile(rb"\x1b(\$[@B]|\([BIJ])"),
    "iso2022_kr": re.compile(rb"\x1b\$\)C"),
}
_LATIN, _LATIN_RUN = re.compile("[\u00c0-\u024f]"), re.compile("[\u00c0-\u024f]{3,}")
_KANA, _MIN_KANA = re.compile("[\u3041-\u30ff]"), 0.1
# ASCII, kana, ideographs and wide forms.
_JAPANESE = re.compile("[\\s!-~\u3000-\u30ff\u4e00-\u9fff\uff01-\uff9f]")
_MIN_JAPANESE = 0.95
_MAX_IN_RUNS = 0.2  # of the accented letters of a Latin text
_ASCII = re.compile(rb"[\0-\x7f]*")
_MARK, _BEGUN_MARK = codecs.BOM_UTF8, re.compile(rb"\xef\xbb?\Z")
_WIDE = ("utf-16", "utf-32")
_GIVEN, _MARKED = "as --encoding says", "by its byte order mark"
_MIN_WORDS = 18  # a few repeated words fit into several encodings
_MISSING = "\udfff"  # marks what an encoding lacks; texts have no lone surrogates
_CONTROL = re.compile("[\0-\x06\x0e-\x1a\x1c-\x1f\x7f-\x9f\ufffe\uffff]")  # not in texts


def _mark_missing(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _MISSING, error.end


codecs.register_error("tgen.mark", _mark_missing)


class Encoding(NamedTuple):
    """The way to read the bytes of a text."""

    codec: str = "utf-8"  # a name that Python knows; utf-8 also for unknown bytes
    start: int = 0  # bytes of the byte order mark
    how: str = ""  # how it is known, for the user; "" for UTF-8 without byte order mark
    share: float = 0.0  # fraction of bytes that are not UTF-8, if they stay as they are
    guess: str = ""  # a codec that may be right, for these
    may_change: bool = True  # the text may have carriage returns or byte order marks

    @property
    def is_plain(self) -> bool:
        """Whether the bytes stay as they are, apart from line breaks."""
        return self.codec == "utf-8" and not self.start


def find_encoding(source: Source, *, given: str | None = None, known: str = "") -> Steps[Encoding]:
    """Return the encoding of a text that is not marked and not certain to be UTF-8: `given` by the
    user, `known` from an earlier detection, or detected."""
    head = source.read(0, _HEAD)
    marked, n_mark = byte_order_mark(head)
    if marked:
        return Encoding(marked, n_mark, _MARKED)
    check = as_part(_check_utf8(source), 0.0, 0.5)
    first_bad, first_wide, may_change = yield from check
    plain = Encoding(may_change=may_change)
    if given is not None and codecs.lookup(given).name in ("utf-8", "utf-8-sig"):
        return plain if first_bad is None else (yield from unknown_encoding(source, ""))
    if given is not None:
        codec = _with_byte_order(codecs.lookup(given).name, head)
        is_wide = b"\0" in head or _detect_japanese(head)
        is_ascii = codec.startswith(_WIDE) and not is_wide
        if first_bad is None and (first_wide is not None or is_ascii):
            return plain._replace(how=f"although --encoding is {given}")
        return Encoding(codec, 0, _GIVEN)
    wide = "" if first_bad is None else _detect_japanese(head)
    if not wide and b"\0" in head:
        wide = _detect_wide(head)
    if wide or b"\0" in head:
        return Encoding(wide, 0, "by its form") if wide else plain
    if first_bad is None:
        fitting = (c for c, mark in _ESCAPES.items() if mark.search(head) and _fits(head, c))
        codec = next(fitting, "") if b"\x1b" in head else ""
        return Encoding(codec, 0, "by its form") if codec else plain
    if known:
        return Encoding(known, 0, "as detected")
    if first_wide is not None and first_bad - first_wide > _MIXED:
        return (yield from unknown_encoding(source, ""))
    sample = source.read(max(0, first_bad - _SAMPLE // 4), _SAMPLE)
    sample = sample[sample.find(b"\n") + 1 :] if first_bad > _SAMPLE // 4 else sample
    n_bad, n_good = _count_utf8(sample)
    confidence = _MIN_CONFIDENCE if len(sample) < _LONG else _MIN_OF_LONG
    codec = "" if n_good > 4 * n_bad else _detect(sample, confidence)
    if codec and _is_sure(sample, codec):
        return Encoding(codec, 0, "as detected")
    return (yield from unknown_encoding(source, codec))


def unknown_encoding(source: Source, guess: str) -> Steps[Encoding]:
    """Return the encoding of bytes that are not UTF-8 and stay as they are; yield fractions from
    0.5 to 1, the second half of `find_encoding`."""
    n_bad = 0
    for block in source.blocks():
        n_bad += _count_utf8(block)[0]
        yield 0.5 + 0.5 * source.position / source.n_bytes
    return Encoding(share=n_bad / source.n_bytes, guess=guess)


@dataclass
class Changes:
    """Differences between the bytes of a text and its UTF-8, besides the encoding."""

    n_line_breaks: int = 0  # LF instead
    n_marks: int = 0  # byte order marks inside, as in joined files: left out
    n_replaced: int = 0  # bytes that are not in a certain encoding: U+FFFD instead


def decode(
    source: Source, encoding: Encoding, changes: Changes, *, line_breaks: bool = True
) -> Iterator[bytes]:
    """Yield a text as UTF-8 without byte order mark and, with `line_breaks`, without those inside
    and with LF.

    A CR is a line break before LF, and in a text whose first block has no LF. Characters that an
    encoding other than UTF-8 lacks become U+FFFD if the user or a byte order mark names it; raises
    UnicodeDecodeError for one that was detected.
    """
    errors = "tgen.mark" if encoding.how in (_GIVEN, _MARKED) else "strict"
    decoder = codecs.getincrementaldecoder(encoding.codec)(errors)
    position, is_old_mac, pending = encoding.start, None, b""
    while True:
        block = source.read(position, _BLOCK)
        position += len(block)
        text = block
        if encoding.codec != "utf-8":
            decoded = decoder.decode(block, final=not block)
            changes.n_replaced += decoded.count(_MISSING)
            text = decoded.replace(_MISSING, "\ufffd").encode("utf-8", "replace")
        if line_breaks:
            text, pending = pending + text, b""
            changes.n_marks += text.count(_MARK)
            text = text.replace(_MARK, b"")
            if block and (begun := _BEGUN_MARK.search(text)):
                text, pending = text[: begun.start()], begun[0]
            if is_old_mac is None:
                is_old_mac = b"\r" in text and b"\n" not in text
            if is_old_mac:
                changes.n_line_breaks += text.count(b"\r")
                text = text.replace(b"\r", b"\n")
            elif b"\r" in text:
                if block and text.endswith(b"\r"):
                    text, pending = text[:-1], b"\r" + pending
                changes.n_line_breaks += text.count(b"\r\n")
                text = text.replace(b"\r\n", b"\n")
        if text:
            yield text
        if not block:
            return


def _check_utf8(source: Source) -> Steps[tuple[int | None, int | None, bool]]:
    """Return the positions of a byte that is not UTF-8 and of one that is not ASCII, None if there
    is none; and whether carriage returns or byte order marks are before the former."""
    first_wide, may_change, rest = None, False, b""
    for position in range(0, source.n_bytes, _BLOCK):
        block = rest + source.read(position, _BLOCK)
        yield source.position / source.n_bytes
        start, rest = position - len(rest), b""
        may_change = may_change or b"\r" in block or _MARK in block
        if block.isascii():
            continue
        if first_wide is None:
            first_wide = start + len(_ASCII.match(block)[0])  # type: ignore[index]
        try:
            is_last = start + len(block) == source.n_bytes
            rest = block[codecs.utf_8_decode(block, "strict", is_last)[1] :]
        except UnicodeDecodeError as error:
            return start + error.start, first_wide, may_change
    return None, first_wide, may_change


def _count_utf8(block: bytes) -> tuple[int, int]:
    """Return how many bytes are not UTF-8, and how many characters of several bytes are."""
    text = block.decode("utf-8", "surrogateescape")
    n_bad = len(re.findall("[\udc80-\udcff]", text))
    return n_bad, len(re.findall("[^\0-\x7f]", text)) - n_bad


def _detect(sample: bytes, min_confidence: float = 0.0) -> str:
    """Return the codec that a sample is most likely in, or "" if nothing is likely."""
    from chardet import EncodingEra, detect  # slow to import

    rare = EncodingEra.LEGACY_REGIONAL | EncodingEra.MAINFRAME
    found = detect(sample, encoding_era=EncodingEra.ALL & ~rare)
    name, confidence = found["encoding"], found["confidence"]
    if not name or confidence < min_confidence:
        return ""
    try:
        codec = codecs.lookup(name).name
    except LookupError:
        return ""
    codec = _EXTENDED.get(codec, codec)
    if codec.startswith("iso8859"):
        common = sample.decode("cp1252", "replace")
        codec = "cp1252" if sample.decode(codec, "replace") == common else codec
    return codec if codec != "utf-8" and _fits(sample, codec) else ""


def _detect_japanese(head: bytes) -> str:
    """Return which UTF-16 a Japanese text has, or "" for other bytes. It may have no zero byte, and
    in other encodings pairs of bytes are hardly ever kana."""
    for codec in ("utf-16-le", "utf-16-be"):
        text = head.decode(codec, "replace")
        n_kana, n_japanese = len(_KANA.findall(text)), len(_JAPANESE.findall(text))
        if n_kana >= _MIN_KANA * len(text) and n_japanese >= _MIN_JAPANESE * len(text):
            return codec
    return ""


def _detect_wide(head: bytes) -> str:
    """Return which UTF-16 or UTF-32 a text without byte order mark has, or "" for other bytes."""
    codec = _detect(head)
    n_high = head[::2].count(0), head[1::2].count(0)  # zeros at even and odd positions
    if codec.startswith("utf-16") and max(n_high) > 4 * min(n_high):
        codec = "utf-16-be" if n_high[0] > n_high[1] else "utf-16-le"
    return codec if codec.startswith(_WIDE) and _fits(head, codec) else ""


def _with_byte_order(codec: str, head: bytes) -> str:
    """Return a codec that needs no byte order mark: by the form, else little-endian."""
    if codec not in _WIDE:
        return codec
    found = _detect_wide(head) or _detect_japanese(head)
    return found if found.startswith(codec) else f"{codec}-le"


def _fits(sample: bytes, codec: str) -> bool:
    """Return whether a sample, which may end within a character, is a text in an encoding."""
    try:
        text = codecs.getincrementaldecoder(codec)().decode(sample)
    except UnicodeError:
        return False
    return not _CONTROL.search(text)


def _is_sure(sample: bytes, codec: str) -> bool:
    """Return whether a sample is long enough, with enough different words that are not ASCII, and
    its parts, every nth line, look alike."""
    if codec.startswith(_WIDE):
        return True
    text = sample.decode(codec, "replace")
    in_runs = sum(map(len, _LATIN_RUN.findall(text)))  # as of Hebrew taken for Latin
    if len(sample) < _MIN_SAMPLE or in_runs > _MAX_IN_RUNS * len(_LATIN.findall(text)):
        return False
    words = {word for word in text.split() if not word.isascii()}
    if len(text) == len(sample) and len(words) < _MIN_WORDS:  # one byte per character
        return False
    lines, n_parts = sample.split(b"\n"), 2 if len(sample) < 2 * _LONG else 5
    parts = [b"\n".join(lines[i::n_parts]) for i in range(n_parts)] if len(lines) > 1 else []
    others = {_detect(part) for part in parts if not part.isascii()} - {codec}
    return all(other and sample.decode(other, "replace") == text for other in others)
