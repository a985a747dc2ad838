"""An index of texts that finds where a passage occurs: a suffix array of the beginnings of words.

A word begins at a byte that is not white space, does not continue a UTF-8 character, and is not a
letter, digit or `_` after another one (in ASCII: other characters are words of their own).

The content of a file has five parts: the documents, each followed by `END`; the positions at which
words begin, sorted by the text from there on (uint32); the number of line breaks before every 64
KiB of the text (int64); the documents (int64: start in the text, number of the file, line of the
first byte, whether all of it is one line of rows); and the names of the files as JSON. A part
begins at a multiple of 8 bytes. The order of bytes is the machine's.
"""

import codecs
import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.conversation import parse_conversation
from tgen.corpus.document_table import Documents
from tgen.corpus.sources import Source
from tgen.corpus.steps import Steps, as_part
from tgen.corpus.suffix_array import BYTES_PER_SUFFIX, END, MAX_BYTES, sort_suffixes
from tgen.errors import CorpusError
from tgen.machine.memory import check_ram
from tgen.storage import sealed_file

_FORMAT = "tgen.text_index/1"
_BLOCK = 1 << 22  # bytes per read
_SCANNED = 1 << 22  # bytes of text whose words are found at a time
_COUNTED = 1 << 16  # bytes of text between two stored numbers of line breaks
_COMPARED = 64  # bytes of a passage that are searched first
_READ = 0.1  # of the time to build an index
_END = bytes([END])

_BYTES = np.arange(256)
_IS_WORD = np.isin(_BYTES, list(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"))
_IS_SPACE = np.isin(_BYTES, list(b" \t\n\r\f\v"))
_CONTINUES = (_BYTES >= 0x80) & (_BYTES < 0xC0)  # a UTF-8 character
_IS_HIGH = (_BYTES >= 0x80) & (_BYTES != END)

Range = tuple[int, int]  # of suffixes, in their order


def _next_in_word(last: int) -> list[tuple[int, int]]:
    """Return the ranges of bytes that continue a word, or a character, after a byte."""
    if _IS_WORD[last]:
        return [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
    return [(0x80, 0xBF)] if _IS_HIGH[last] else []


def word_borders(text: bytes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(n + 1,), (n + 1,): at which positions of a text words begin, and end."""
    codes = np.frombuffer(text, np.uint8)
    before, after = codes[:-1], codes[1:]
    joined = np.zeros(len(codes) + 1, bool)
    joined[1:-1] = (_IS_WORD[before] & _IS_WORD[after]) | (_IS_HIGH[before] & _CONTINUES[after])
    no_word = _IS_SPACE[codes] | (codes == END)
    begins, ends = ~joined, ~joined
    begins[:-1] &= ~no_word
    ends[1:] &= ~no_word
    begins[-1] = ends[0] = False
    return begins, ends


def word_starts(text: bytearray) -> NDArray[np.uint32]:
    """(m,): the positions at which words begin."""
    found = [np.zeros(0, np.uint32)]
    for start in range(0, len(text), _SCANNED):
        first = max(0, start - 1)  # the byte before tells whether a word continues
        begins, _ = word_borders(bytes(text[first : start + _SCANNED]))
        found.append((np.flatnonzero(begins[start - first :]) + start).astype(np.uint32))
    return np.concatenate(found)


class Place(NamedTuple):
    """An occurrence of a passage."""

    file: str
    line: int
    before: bytes
    after: bytes


class TextIndex:
    """An index in memory or in a mapped file; `corpus_sha256` is the digest of its corpus.

    Raises ValueError if the content does not fit the header.
    """

    def __init__(self, header: dict[str, Any], content: memoryview) -> None:
        if (header.get("format"), header.get("byteorder")) != (_FORMAT, sys.byteorder):
            raise ValueError("another format")
        sizes = header.get("sizes")
        if not isinstance(sizes, list) or len(sizes) != 5 or any(type(n) is not int for n in sizes):
            raise ValueError("no sizes of the parts")
        starts = [0, *accumulate(map(_padded, sizes))]
        if min(sizes) < 0 or starts[-1] != len(content):
            raise ValueError("sizes differ")
        parts = [content[i : i + n] for i, n in zip(starts, sizes, strict=False)]
        self.corpus_sha256 = str(header.get("corpus_sha256"))
        self.n_bytes, self._text = sizes[0], parts[0]
        self._suffixes, self._line_breaks = parts[1].cast("I"), parts[2].cast("q")
        self._documents: NDArray[np.int64] = np.frombuffer(parts[3], np.int64).reshape(4, -1)
        names = json.loads(bytes(parts[4]))
        limits = np.array([[self.n_bytes], [len(names)]])
        if not ((self._documents[:2] >= 0) & (self._documents[:2] < limits)).all():
            raise ValueError("documents without a file")
        self._names = [str(name) for name in names]
        if len(self._line_breaks) != len(range(0, self.n_bytes, _COUNTED)):
            raise ValueError("no numbers of lines")

    def longest_match(self, phrase: bytes) -> int:
        """Return how many bytes of a phrase, which begins at a word, occur somewhere."""
        low, high, n = 0, len(self._suffixes), 0
        while n < len(phrase):
            longer = min(len(phrase), max(_COMPARED, 4 * n))
            found = self._find(phrase[:longer], low, high)
            if found[0] == found[1]:
                beside = self._suffixes[max(0, found[0] - 1) : found[0] + 1]
                return max((_n_equal(phrase, self._read(i, longer)) for i in beside), default=0)
            (low, high), n = found, longer
        return n

    def whole_matches(self, passage: bytes) -> list[Range]:
        """Return where a passage occurs that begins and ends with a word, as whole words."""
        low, high = self._find(passage, 0, len(self._suffixes))
        whole = []
        for first, last in _next_in_word(passage[-1]):
            longer, _ = self._find(passage + bytes([first]), low, high)
            whole.append((low, longer))
            _, low = self._find(passage + bytes([last]), longer, high)
        return [(a, b) for a, b in [*whole, (low, high)] if a < b]

    def places(self, ranges: list[Range], n_bytes: int, *, n: int, context: int) -> list[Place]:
        """Return the first `n` occurrences, in the order of the text, of a passage of `n_bytes`
        with up to `context` bytes on both sides."""
        positions = np.concatenate(
            [np.frombuffer(self._suffixes[a:b], np.uint32) for a, b in ranges]
        )
        if len(positions) > n:
            positions = np.partition(positions, n - 1)[:n]
        return [self._place(p, n_bytes, context) for p in np.sort(positions).tolist()]

    def _place(self, position: int, n_bytes: int, context: int) -> Place:
        starts, files, lines, is_row = self._documents
        i = max(0, bisect_right(starts, position) - 1)
        line = int(lines[i])
        if not is_row[i]:
            line += self._count_lines(position) - self._count_lines(int(starts[i]))
        end = position + n_bytes
        before = bytes(self._text[max(0, position - context) : position]).rpartition(_END)[2]
        after = self._read(end, context).partition(_END)[0]
        return Place(self._names[files[i]], line, _after_partial(before), _before_partial(after))

    def _count_lines(self, position: int) -> int:
        i = min(position, self.n_bytes - 1) // _COUNTED
        return int(self._line_breaks[i]) + bytes(self._text[i * _COUNTED : position]).count(b"\n")

    def _find(self, start: bytes, low: int, high: int) -> Range:
        """Return which of the suffixes from `low` to `high` start with these bytes."""
        key = partial(self._read, n=len(start))
        low = bisect_left(self._suffixes, start, low, high, key=key)
        return low, bisect_right(self._suffixes, start, low, high, key=key)

    def _read(self, position: int, n: int) -> bytes:
        return bytes(self._text[position : position + n])


def _n_equal(a: bytes, b: bytes) -> int:
    """Return how many first bytes are equal, in few comparisons: they may be many."""
    lengths = range(1, min(len(a), len(b)) + 1)
    return bisect_left(lengths, True, key=lambda n: a[:n] != b[:n])


def _after_partial(text: bytes) -> bytes:
    """Return a cut text without the rest of a character at its start."""
    n = sum(1 for _ in takewhile(lambda byte: 0x80 <= byte < 0xC0, text[:3]))
    return text[n:]


def _before_partial(text: bytes) -> bytes:
    """Return a cut text without the beginning of a character at its end."""
    return text[: codecs.utf_8_decode(text, "surrogateescape", False)[1]]


def open_index(path: Path) -> TextIndex | None:
    """Map an index; None if it is missing, damaged, incomplete, of another user or program."""
    sealed = sealed_file.open_sealed(path)
    if sealed is None:
        return None
    try:
        return TextIndex(*sealed)
    except (ValueError, TypeError, RecursionError):
        return None


class NewIndex(NamedTuple):
    """An index to write or to use at once."""

    header: dict[str, Any]
    parts: list[bytes | memoryview]

    def save(self, path: Path) -> None:
        """Write the index in place of `path`, readable by this user only."""
        sealed_file.publish_sealed(path, sealed_file.encode_header(self.header), self.parts)

    def open(self) -> TextIndex:
        """Use the index in memory."""
        return TextIndex(self.header, memoryview(b"".join(self.parts)))


def build_index(
    documents: Documents, corpus_sha256: str, shown_name: Callable[[str], str]
) -> Steps[NewIndex]:
    """Index documents; yield the fraction done. `shown_name` returns a file's name in results.

    Raises CorpusError if a source has changed, or if the documents are too large.
    """
    if documents.n_bytes + len(documents) > MAX_BYTES:
        raise CorpusError(
            f"a text of {documents.n_bytes:,} bytes cannot be indexed (limit {MAX_BYTES:,})",
            "remove --index",
        )
    text, table, names = yield from as_part(_collect(documents, shown_name), 0.0, _READ)
    starts = word_starts(text)
    needed = BYTES_PER_SUFFIX * len(starts) + len(text)
    check_ram(needed, "the index of the training text", "remove --index, or use a smaller corpus")
    suffixes = yield from as_part(sort_suffixes(text, starts), _READ, 1.0)
    per_block = [text.count(b"\n", i, i + _COUNTED) for i in range(0, len(text), _COUNTED)]
    line_breaks = np.cumsum([0, *per_block], dtype=np.int64)[:-1]
    small = (line_breaks.tobytes(), table.tobytes(), json.dumps(names).encode())
    views = [memoryview(text), suffixes.view(np.uint8).data, *(memoryview(part) for part in small)]
    header = {
        "format": _FORMAT,
        "byteorder": sys.byteorder,
        "corpus_sha256": corpus_sha256,
        "sizes": [len(view) for view in views],
    }
    gaps = [bytes(_padded(len(view)) - len(view)) for view in views]
    return NewIndex(header, [block for pair in zip(views, gaps, strict=True) for block in pair])


def _padded(n: int) -> int:
    return -(-n // 8) * 8


def _collect(
    documents: Documents, shown_name: Callable[[str], str]
) -> Steps[tuple[bytearray, NDArray[np.int64], list[str]]]:
    """Return the text, the table of documents and the names of the files."""
    text, rows, numbers = bytearray(), [], dict[str, int]()
    lines, end = _LineCounter(), -1
    for i in range(len(documents)):
        (source, start, is_row, is_chat), document = documents.place(i), documents[i]
        if is_row or start != end or source is not lines.source:  # else a piece of the same text
            number = numbers.setdefault(shown_name(source.name), len(numbers))
            rows.append((len(text), number, lines.line_of(source, start), is_row))
        else:
            del text[-1:]
        for part in _messages(document[0][:]) if is_chat else document:
            for position in range(0, len(part), _BLOCK):
                text += part[position : position + _BLOCK]
            text += _END * is_chat
        text += _END * (not is_chat)
        end = start + int(documents.sizes[i])
        if i % 256 == 0:
            yield i / len(documents)
    documents.close()
    return text, np.array(rows, np.int64).reshape(-1, 4).T.copy(), list(numbers)


def _messages(row: bytes) -> Iterator[bytes]:
    for message in parse_conversation(row).messages:
        yield message["content"].encode("utf-8", "surrogateescape")


class _LineCounter:
    """The lines of positions that come in ascending order."""

    def __init__(self) -> None:
        self.source: Source | None = None
        self._position = self._line = 0

    def line_of(self, source: Source, position: int) -> int:
        """Return the number, from 1, of the line that has a byte of a source."""
        if source is not self.source or position < self._position:
            self.source, self._position, self._line = source, 0, 1
        while self._position < position:
            block = source.read(self._position, min(_BLOCK, position - self._position))
            self._line += block.count(b"\n")
            self._position += len(block)
            if not block:
                raise source.changed_error()
        return self._line
