"""Lines of printed pages become paragraphs: lines joined, divided words put together."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

_BULLET, _NUMBER = re.compile(r"[•‣▪◦●○■□➢∙❑❖◻✓]\s"), re.compile(r"(\d{1,3})[.)]\s")
_MAX_GAP = 1.3  # times the usual distance of lines: more begins a paragraph
_FULL = 0.88  # of the usual length: a line that the next word would make longer is wrapped
_VERSE = 0.8  # of the lines inside of blocks begin with a capital letter: all are verse
_MIN_LINES = 8  # of a size, to know how long its lines are


class Line(NamedTuple):
    """A line of a page."""

    x: float  # of its start, in points
    y: float  # upwards
    size: float  # of the font
    text: str


def join_lines(pages: Sequence[list[Line]]) -> str:
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


def _begins_item(line: Line, numbers: dict[int, int]) -> bool:
    """Return whether a line begins with a bullet, with 1, or with the number after that in
    `numbers`, which it replaces."""
    found, place = _NUMBER.match(line.text), round(line.x)
    if found is None:
        return _BULLET.match(line.text) is not None
    if int(found[1]) not in (1, numbers.get(place, 0) + 1):
        return False
    numbers[place] = int(found[1])
    return True


def _places(pages: Sequence[list[Line]]) -> list[str]:
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
    above: Line | None = None
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


def _margins(lines: Sequence[Line]) -> list[float]:
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
