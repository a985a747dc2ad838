"""PDF, by the library pypdf: lines of text and their places become paragraphs."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, BinaryIO, NamedTuple

from tgen.documents.package import DAMAGED_HINT, LOCKED_HINT
from tgen.errors import CorpusError

_LIGATURES = str.maketrans({0xFB00 + i: s for i, s in enumerate("ff fi fl ffi ffl st st".split())})
_PAGE_NUMBER = re.compile(r"\W*(\w+\.? )?#( ?(/|of|von|sur|de|di|van) #)?\W*|\W*[ivxlcIVXLC]+\W*")
_MAX_GAP = 1.3  # times the usual distance of lines: more begins a paragraph
_FULL = 0.88  # of the usual length: a line that the next word would make longer is wrapped
_VERSE = 0.6  # of the lines of a page begin with a capital letter: they are verse, or a list
_MIN_LINES = 4  # of a page of verse


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
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

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
            reader.resolved_objects.clear()
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
    yield _join_lines(_without_repeated(pages))


def _lines(page: Any) -> list[_Line]:
    """Return the lines of a page in the order of its content."""
    lines: list[_Line] = []
    parts: list[tuple[float, float, float, str]] = []

    def end_line() -> None:
        shown = [part for part in parts if part[3].strip()]
        if shown:
            size = max(shown, key=lambda part: len(part[3]))[2]
            text = "".join(part[3] for part in parts).translate(_LIGATURES)
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

    page.extract_text(visitor_text=visit)
    end_line()
    return lines


def _count_pictures(page: Any) -> int:
    try:
        objects = page["/Resources"]["/XObject"].values()
        return sum(item.get_object().get("/Subtype") == "/Image" for item in objects)
    except (LookupError, AttributeError, TypeError):
        return 0


def _without_repeated(pages: Sequence[list[_Line]]) -> list[list[_Line]]:
    """Return the pages without headers, footers and page numbers: of the two highest and the two
    lowest lines, those whose text, apart from numbers, is in the same place of several pages."""
    found: Counter[tuple[int, str]] = Counter()
    edges: list[dict[int, tuple[int, str]]] = []
    for lines in pages:
        by_height = sorted(range(len(lines)), key=lambda i, lines=lines: lines[i].y)
        edge = {
            i: (round(lines[i].y / 2), re.sub(r"\d+", "#", lines[i].text))
            for i in {*by_height[:2], *by_height[-2:]}
        }
        found.update(set(edge.values()))
        edges.append(edge)

    def is_repeated(key: tuple[int, str]) -> bool:
        number = _PAGE_NUMBER.fullmatch(key[1])
        same_place = sum(
            n for (y, text), n in found.items() if y == key[0] and _PAGE_NUMBER.fullmatch(text)
        ) if number else found[key]  # fmt: skip
        return same_place >= (2 if number else 3)

    repeated = {key for key in found if is_repeated(key)}
    return [
        [line for i, line in enumerate(lines) if edge.get(i) not in repeated]
        for lines, edge in zip(pages, edges, strict=True)
    ]


def _join_lines(pages: Sequence[list[_Line]]) -> str:
    """Return the text of lines: paragraphs joined, words put together, verse lines kept."""
    gaps = sorted(
        (above.y - line.y) / line.size
        for lines in pages
        for above, line in zip(lines, lines[1:], strict=False)
        if line.size and 0.5 < (above.y - line.y) / line.size < 3 and abs(above.size - line.size) < 1
    )
    usual_gap = median(gaps) if gaps else 1.2
    lengths = sorted(len(line.text) for lines in pages for line in lines)
    usual_length = lengths[int(0.75 * len(lengths))] if lengths else 0
    words = {word for lines in pages for line in lines for word in re.findall(r"[\w-]+", line.text)}
    parts: list[str] = []
    above: _Line | None = None
    for lines in pages:
        margins = _margins(lines)
        n_capitals = sum(line.text[0].isupper() for line in lines)
        is_verse = n_capitals > _VERSE * len(lines) and len(lines) >= _MIN_LINES
        for i, line in enumerate(lines):
            if above is not None:
                gap = (above.y - line.y) / line.size / usual_gap if line.size else 1
                first = line.text.split(" ")[0] if line.text.isascii() else line.text[:1]
                is_wrapped = len(above.text) + len(first) >= _FULL * usual_length and not is_verse
                is_apart = i > 0 and (gap > _MAX_GAP or 0.3 < gap < 0.6)
                is_heading = abs(above.size - line.size) > 0.1 * max(above.size, line.size)
                is_indented = _is_indented(line.x, margins, line.size) and not is_verse
                if is_apart or is_heading or is_indented:
                    parts.append("\n\n")
                elif not is_wrapped:
                    new_page = i == 0 or gap < 0
                    parts.append("\n\n" if new_page and not is_verse else "\n")
                elif parts[-1][-1] in "-‐\xad" and parts[-1][-2:-1].isalpha() and line.text[0].islower():
                    parts[-1] = _without_hyphen(parts[-1], line.text, words)
                elif not (_is_wide(parts[-1][-1]) and _is_wide(line.text[0])):
                    parts.append(" ")
            parts.append(line.text)
            above = line
    return "".join(parts).replace("\xad", "")


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
    if first and second and before[-1] != "\xad":
        if f"{first[0]}-{second[0]}" in words and first[0] + second[0] not in words:
            return before
    return before[:-1]


def _is_wide(character: str) -> bool:
    """Return whether a character is of a script without spaces between words."""
    return "\u2e80" <= character <= "\ua4cf" or "\uf900" <= character <= "\uffef"
