"""PDF, by the library pypdf: the lines of the text, and their positions on the pages.

Headers, footers and page numbers are left out; `paragraphs.py` joins the other lines.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO
from unicodedata import normalize

from tgen.documents.package import DAMAGED_HINT, LOCKED_HINT
from tgen.documents.paragraphs import Line, join_lines
from tgen.documents.text_builder import SYMBOLS
from tgen.errors import CorpusError

_JOINED = ["ff", "fi", "fl", "ffi", "ffl", "st", "st"]
_CHARACTERS = SYMBOLS | {0xFB00 + i: s for i, s in enumerate(_JOINED)}
_ACCENTS = {"´": "\u0301", "¨": "\u0308", "ˆ": "\u0302", "˜": "\u0303"}  # set by TeX
_ACCENT = re.compile(r"(?<!\w)ˆ[A-Z]\b|([´¨ˆ˜])([^\W\d_])")  # but ˆC is a key
_NOTE_MARK = re.compile(r"\s*(\d{1,3}|[*†‡]+)\s*")
_WORD_END = re.compile(r"([^\W\d_]{3}|[.,;:!?”\"’)])\s*$")
_ROMAN = re.compile(r"\W*[ivxlc]+\W*", re.I)
_FEW_PAGES = 5  # where a line in the same place of two pages is a header or a footer
_NEAR = 4  # pages: where the lines of two pages are compared


def read_pdf(
    file: BinaryIO, left_out: Counter[str], progress: Callable[[float], None] = lambda _: None
) -> Iterator[str]:
    """Yield the text without what repeats on pages and their numbers.

    Raises CorpusError if the file is encrypted, needs a missing package, or has no text.
    """
    import logging

    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    logging.disable()  # of what it repairs, which can take most of the time
    pages: list[list[Line]] = []
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
    except FileNotDecryptedError:
        raise CorpusError("is encrypted", LOCKED_HINT) from None
    except DependencyError as error:
        needed = "brotli" if "brotli" in str(error) else "cryptography"
        how = "compressed with Brotli" if needed == "brotli" else "encrypted with AES"
        raise CorpusError(
            f"is {how}, which needs the package {needed}",
            f"if it opens without a password, run pip install {needed}; else {LOCKED_HINT}",
        ) from None
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
    yield join_lines(text)


def _without_repeated(pages: Sequence[list[Line]]) -> list[list[Line]]:
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


def _edge_keys(line: Line, page: int) -> set[tuple[object, ...]]:
    """Return what a line may have in common with the header or footer of another page."""
    height = round(line.y / 2)
    keys: set[tuple[object, ...]] = {(height, line.text)}
    if _ROMAN.fullmatch(line.text):
        keys.add((height, "roman"))
    for number in re.findall(r"\b\d{1,5}\b", line.text):
        keys.add((height, int(number) - page))
    return keys


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


def _lines(page: Any) -> list[Line]:
    """Return the lines of a page in the order of its content."""
    lines: list[Line] = []
    parts: list[tuple[float, float, float, str]] = []

    def end_line() -> None:
        shown = [part for part in parts if part[3].strip()]
        if shown:
            size = max(shown, key=lambda part: len(part[3]))[2]
            text = ""
            for *_, height, piece in parts:
                if not (height < 0.8 * size and _is_note_mark(piece, text)):
                    text += piece.translate(_CHARACTERS)
            text = _ACCENT.sub(_compose, text)
            lines.append(Line(*shown[0][:2], size, " ".join(text.split())))
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
