"""PDF, by the library pypdf: lines of text and their places become paragraphs."""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any, BinaryIO, NamedTuple
from unicodedata import normalize

from tgen.documents.package import DAMAGED_HINT, LOCKED_HINT
from tgen.errors import CorpusError

_JOINED = ["ff", "fi", "fl", "ffi", "ffl", "st", "st"]
_LIGATURES = str.maketrans({0xFB00 + i: s for i, s in enumerate(_JOINED)})
_ACCENTS = {"´": "\u0301", "¨": "\u0308", "ˆ": "\u0302", "˜": "\u0303"}  # set by TeX
_ACCENT = re.compile(r"(?<!\w)ˆ[A-Z]\b|([´¨ˆ˜])([^\W\d_])")  # but ˆC is a key
_ROMAN = re.compile(r"\W*[ivxlc]+\W*", re.I)
_NOTE_MARK = re.compile(r"\s*(\d{1,3}|[*†‡]+)\s*")
_BULLET, _NUMBER = re.compile(r"[•‣▪◦●○■□➢∙]\s"), re.compile(r"(\d{1,3})[.)]\s")
_WORD_END = re.compile(r"([^\W\d_]{3}|[.,;:!?”\"’)])\s*$")
_FEW_PAGES = 5  # where a line in the same place of two pages is a header or a footer
_MAX_GAP = 1.3  # times the usual distance of lines: more begins a paragraph
_FULL = 0.88  # of the usual length: a line that the next word would make longer is wrapped
_VERSE = 0.8  # of the lines inside of blocks begin with a capital letter: all are verse
_NEAR = 4  # pages: where the lines of two pages are compared
_MIN_LINES = 8  # of a size, to know how long its lines are


class _Line(NamedTuple):
    x: float  # of its start, in points
    y: float  # upwards
    size: float  # of the font
    text: str


def read_pdf(
    file: BinaryIO, left_out: Counter[str], progress: Callable[[float], None] = lambda _: None
) -> Iterator[str]:
    """Yield the text without what repeats on pages and their numbers.

    Raises CorpusError if the file is encrypted, or has no text.
    """
    import logging

    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    logging.disable()  # of what it repairs, which can take most of the time
    pages: list[list[_Line]] = []
    n_pictures = 0
    try:
        reader = PdfReader(file)
        if reader.is_encrypted and not reader.decrypt(""):
            raise CorpusError("is encrypted", LOCKED_HINT)
        n_pages = len(reader.pages)
        for number, page in enumerate(reader.pages):
            pages.append(_lines(page))
            n_pictures += _count_pictures(page)
            progress((number + 1) / n_pages)
    except (DependencyError, FileNotDecryptedError):
        raise CorpusError("is encrypted", LOCKED_HINT) from None
    except PyPdfError as error:
        raise CorpusError(f"is damaged: {error}", DAMAGED_HINT) from None
    n_empty = sum(not lines for lines in pages)
    if n_empty == len(pages):
        content = "only pictures" if n_pictures else "empty"
        raise CorpusError(
            f"has no text: its pages ({n_empty:,}) are {content}",
            "recognize its text first: ocrmypdf scanned.pdf text.pdf",
        )
    left_out["page without text"] += n_empty
    left_out["picture"] += n_pictures
    text = _without_repeated(pages)
    left_out["header or footer line"] += sum(map(len, pages)) - sum(map(len, text))
    yield _join_lines(text)


def _without_word_spacing(page: Any) -> Callable[..., None]:
    """Return a visitor of a page's operators that takes the spacing of words (Tw) from the moves
    that follow on the same line.

    pypdf leaves it out of the width of a text, and so takes the rest of a word for the next one.
    Text of several bytes per character has no such spacing.
    """
    spacing = added = moved = 0.0  # per space; since the last move; by all moves on the line
    is_simple = True
    saved: list[float] = []

    def visit(operator: bytes, operands: list[Any], *_: object) -> None:
        nonlocal spacing, added, moved, is_simple
        with suppress(LookupError, TypeError, ValueError, AttributeError):  # damaged operands
            if operator == b"Tw":
                spacing = float(operands[0])
            elif operator == b"Tf":
                is_simple = page["/Resources"]["/Font"][operands[0]]["/Subtype"] != "/Type0"
            elif operator == b"q":
                saved.append(spacing)
            elif operator == b"Q":
                spacing = saved.pop()
            elif operator in (b"Tj", b"TJ") and spacing and is_simple:
                parts = operands[0] if operator == b"TJ" else operands
                added += spacing * sum(
                    part.count(b" ") for part in parts if isinstance(part, bytes)
                )
            elif operator in (b"Td", b"TD"):
                change = moved if operands[1] else -added
                operands[0] += change
                moved, added = (0.0 if operands[1] else moved + added), 0.0
            elif operator in (b"Tm", b"BT"):
                added = moved = 0.0

    return visit


def _lines(page: Any) -> list[_Line]:
    """Return the lines of a page in the order of its content."""
    lines: list[_Line] = []
    parts: list[tuple[float, float, float, str]] = []

    def end_line() -> None:
        shown = [part for part in parts if part[3].strip()]
        if shown:
            size = max(shown, key=lambda part: len(part[3]))[2]
            text = ""
            for *_, height, piece in parts:
                if not (height < 0.8 * size and _is_note_mark(piece, text)):
                    text += piece.translate(_LIGATURES)
            text = _ACCENT.sub(_compose, text)
            lines.append(_Line(*shown[0][:2], size, " ".join(text.split())))
        parts.clear()

    def visit(text: str, cm: Any, tm: Any, _: Any, size: float) -> None:
        x = tm[4] * cm[0] + tm[5] * cm[2] + cm[4]
        y = tm[4] * cm[1] + tm[5] * cm[3] + cm[5]
        height = abs(size * (tm[3] or tm[1] or 1) * (cm[3] or cm[1] or 1))
        for i, piece in enumerate(text.split("\n")):
            if i:
                end_line()
            parts.append((x, y, height, piece))

    page.extract_text(visitor_operand_before=_without_word_spacing(page), visitor_text=visit)
    end_line()
    return lines


def _compose(found: re.Match[str]) -> str:
    return normalize("NFC", found[2] + _ACCENTS[found[1]]) if found[1] else found[0]


def _is_note_mark(text: str, before: str) -> bool:
    """Return whether small text is the number of a note, not an exponent: after a word or stop."""
    return bool(_NOTE_MARK.fullmatch(text) and _WORD_END.search(before))


def _count_pictures(page: Any) -> int:
    try:
        objects = page["/Resources"]["/XObject"].values()
        return sum(item.get_object().get("/Subtype") == "/Image" for item in objects)
    except (LookupError, AttributeError, TypeError):
        return 0


def _without_repeated(pages: Sequence[list[_Line]]) -> list[list[_Line]]:
    """Return the pages without headers, footers and page numbers: of the two highest and the two
    lowest lines, those that pages near by have in the same place, apart from the page's number."""
    found: dict[tuple[object, ...], list[int]] = {}  # pages
    edges: list[dict[int, set[tuple[object, ...]]]] = []
    for page, lines in enumerate(pages):
        order = [i for _, i in sorted((line.y, i) for i, line in enumerate(lines))]
        edges.append({i: _edge_keys(lines[i], page) for i in {*order[:2], *order[-2:]}})
        for key in set().union(*edges[-1].values()):
            found.setdefault(key, []).append(page)
    enough = 2 if len(pages) <= _FEW_PAGES else 3

    def is_repeated(key: tuple[object, ...], page: int) -> bool:
        return bisect_left(found[key], page - _NEAR) + enough <= bisect_right(
            found[key], page + _NEAR
        )

    return [
        [
            line
            for i, line in enumerate(lines)
            if not any(is_repeated(key, page) for key in edges[page].get(i, ()))
        ]
        for page, lines in enumerate(pages)
    ]


def _edge_keys(line: _Line, page: int) -> set[tuple[object, ...]]:
    """Return what a line may have in common with the header or footer of another page."""
    height = round(line.y / 2)
    keys: set[tuple[object, ...]] = {(height, line.text)}
    if _ROMAN.fullmatch(line.text):
        keys.add((height, "roman"))
    for number in re.findall(r"\b\d{1,5}\b", line.text):
        keys.add((height, int(number) - page))
    return keys


def _join_lines(pages: Sequence[list[_Line]]) -> str:
    """Return the text of lines: paragraphs joined, divided words put together; verse lines and
    items of lists kept."""
    lines = [line for page in pages for line in page]
    places = _places(pages)
    following = [line.text for line, place in zip(lines, places, strict=True) if place == "next"]
    is_verse = sum(text[0].isupper() for text in following) > _VERSE * len(following)
    words = {word for line in lines for word in re.findall(r"[\w-]+", line.text)}
    lengths: dict[int, list[int]] = {}  # by size of the font
    for line in lines:
        lengths.setdefault(round(line.size), []).append(len(line.text))
    body = max(lengths, key=lambda size: sum(lengths[size]))
    long = {size: sorted(of_size)[int(0.9 * len(of_size))] for size, of_size in lengths.items()}
    usual = {  # how long a line of this size can be
        size: long[size] if len(lengths[size]) >= _MIN_LINES else long[body] * body / max(1, size)
        for size in lengths
    }
    pairs = list(zip(lines, lines[1:], places[1:], strict=False))
    full = [
        len(above.text) + len(line.text.split(" ")[0] if line.text.isascii() else line.text[:4])
        >= _FULL * usual[round(above.size)]
        for above, line, _ in pairs
    ]
    # How many more full lines are in a hanging paragraph than are its indented first line
    n_hanging = sum(
        (place == "indented") - (place == "next" and line.x < above.x - 0.7 * line.size)
        for is_full, (above, line, place) in zip(full, pairs, strict=True)
        if is_full
    )
    parts = [lines[0].text]
    numbers: dict[int, int] = {}  # of the last item of a list, by its place
    for is_full, (above, line, place) in zip(full, pairs, strict=True):
        begins_item = _begins_item(line, numbers)
        divides = re.search(r"[^\W\d_][-‐\xad]$", above.text) and line.text[0].islower()
        if place == "apart" or (place == "indented" and not (n_hanging > 0 and is_full)):
            parts.append("\n\n")
        elif is_verse or begins_item or not (is_full or divides):
            parts.append("\n\n" if place == "page" and not is_verse else "\n")
        elif divides:
            parts[-1] = _without_hyphen(above.text, line.text, words)
        elif not (_is_wide(above.text[-1]) and _is_wide(line.text[0])):
            parts.append(" ")
        parts.append(line.text)
    return "".join(parts).replace("\xad", "")


def _begins_item(line: _Line, numbers: dict[int, int]) -> bool:
    """Return whether a line begins with a bullet, with 1, or with the number after that in
    `numbers`, which it replaces."""
    found, place = _NUMBER.match(line.text), round(line.x)
    if found is None:
        return _BULLET.match(line.text) is not None
    if int(found[1]) not in (1, numbers.get(place, 0) + 1):
        return False
    numbers[place] = int(found[1])
    return True


def _places(pages: Sequence[list[_Line]]) -> list[str]:
    """Return where each line is, seen from the one before: "next" to it, "apart" (a gap, another
    size, indented), "indented" as far as that one, or at the top of another "page" or column."""
    gaps = [
        (above.y - line.y) / line.size
        for page in pages
        for above, line in pairwise(page)
        if 0.5 * line.size < above.y - line.y < 3 * line.size and abs(above.size - line.size) < 1
    ]
    usual_gap = median(gaps) if gaps else 1.2
    places: list[str] = []
    above: _Line | None = None
    for page in pages:
        margins = _margins(page)
        page_gaps = [(a.y - b.y) / (b.size or 1) for a, b in pairwise(page)]
        for i, line in enumerate(page):
            around = [page_gaps[j] for j in (i - 2, i) if 0 <= j < len(page_gaps)]
            usual = min([usual_gap, *(gap for gap in around if gap >= 1)])
            gap = (above.y - line.y) / (line.size or 1) / usual if above else 0.0
            sizes = (above.size, line.size) if above else (1, 1)
            is_indented = _is_indented(line.x, margins, line.size)
            if max(sizes) > 1.1 * min(sizes) or (i and gap > _MAX_GAP):
                places.append("apart")
            elif is_indented and i and above and gap >= 0 and abs(line.x - above.x) < 1:
                places.append("indented")
            elif is_indented:
                places.append("apart")
            elif i == 0 or gap < 0:
                places.append("page")
            else:
                places.append("next")
            above = line
    return places


def _margins(lines: Sequence[_Line]) -> list[float]:
    """Return where many lines of a page start, ascending, apart from indented ones."""
    starts = Counter(round(line.x) for line in lines)
    margins: list[float] = []
    for x in sorted(x for x, n in starts.items() if n >= max(2, 0.1 * len(lines))):
        if not margins or x - margins[-1] > 60:
            margins.append(x)
    return margins


def _is_indented(x: float, margins: Sequence[float], size: float) -> bool:
    i = bisect_right(margins, x + 1) - 1
    return i >= 0 and 0.7 * size < x - margins[i] < 4 * size


def _without_hyphen(before: str, after: str, words: set[str]) -> str:
    """Return the line `before` without its hyphen, unless the text has the word with it."""
    first = re.findall(r"[\w-]+$", before[:-1])
    second = re.findall(r"^\w+", after)
    is_kept = (
        bool(first and second)
        and before[-1] != "\xad"
        and f"{first[0]}-{second[0]}" in words
        and first[0] + second[0] not in words
    )
    return before if is_kept else before[:-1]


def _is_wide(character: str) -> bool:
    """Return whether a character is of a script without spaces between words."""
    return "\u2e80" <= character <= "\ua4cf" or "\uf900" <= character <= "\uffef"
