"""Line plots in the terminal: a canvas of braille dots, and axes with round ticks.

Dots count from the lower left corner; a character is 2 dots wide and 4 high.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_BITS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))  # by row and column in a character
_BLANK = 0x2800
MARGIN = 10  # columns left of the dots: a label, a space and the axis
DIM = "dim"


class Canvas:
    """A rectangle of `columns` by `rows` characters; dots outside are ignored."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._bits = [[0] * columns for _ in range(rows)]
        self._styles = [[""] * columns for _ in range(rows)]
        self._marks: dict[tuple[int, int], str] = {}

    def dot(self, x: int, y: int, style: str = "") -> None:
        """Draw one dot; the last style within a character applies to all of it."""
        if 0 <= x < 2 * self.columns and 0 <= y < 4 * self.rows:
            row, column = y // 4, x // 2
            self._bits[row][column] |= _BITS[y % 4][x % 2]
            self._styles[row][column] = style

    def line(self, points: list[tuple[int, int]], style: str = "") -> None:
        """Draw straight lines from each point to the next; a single point is a dot."""
        for (x, y), (next_x, next_y) in zip(points, points[1:] or points, strict=False):
            n = max(abs(next_x - x), abs(next_y - y), 1)
            inside_x = _inside(x, next_x, n, 2 * self.columns)
            inside_y = _inside(y, next_y, n, 4 * self.rows)
            for i in range(max(inside_x.start, inside_y.start), min(inside_x.stop, inside_y.stop)):
                dx, dy = (next_x - x) * i / n, (next_y - y) * i / n
                self.dot(x + round(dx), y + round(dy), style)

    def mark(self, x: int, y: int, character: str, style: str = "") -> None:
        """Replace the dots of the character at (x, y) with another character."""
        if 0 <= x < 2 * self.columns and 0 <= y < 4 * self.rows:
            self._marks[y // 4, x // 2] = character
            self._styles[y // 4][x // 2] = style

    def lines(self) -> list[Text]:
        """Return the lines of text, the top line first."""
        rows = []
        for row in reversed(range(self.rows)):
            text = Text(no_wrap=True)
            for column in range(self.columns):
                bits = self._bits[row][column]
                dots = chr(_BLANK + bits) if bits else " "
                text.append(self._marks.get((row, column), dots), self._styles[row][column])
            rows.append(text)
        return rows


def _inside(start: int, end: int, n: int, size: int) -> range:
    """Return the steps, of n from `start` to `end`, that may round to a dot from 0 to size - 1.

    A point of a log may be any distance away.
    """
    if start == end:
        return range(n + 1) if 0 <= start < size else range(0)
    first, last = sorted((edge - start) * n // (end - start) for edge in (-1, size))
    return range(max(0, first), min(n, last + 1) + 1)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear scale from the values `low` to `high` to `dots` dots."""

    low: float
    high: float
    dots: int

    def dot(self, value: float) -> int:
        """Return the dot of a value; values outside the axis have dots outside it."""
        span = self.high - self.low
        return round((value - self.low) / span * (self.dots - 1)) if span > 0 else 0

    def ticks(self, max_ticks: int) -> list[float]:
        """Return at most `max_ticks` round values: multiples of 1, 2 or 5 times a power of 10."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        unit = 10.0 ** math.floor(math.log10(span / max_ticks))
        step = next(n * unit for n in (1, 2, 5, 10, 20) if span / (n * unit) <= max_ticks - 1)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [i * step for i in range(first, last + 1)]


def with_axis(canvas: Canvas, labels: dict[int, str]) -> list[Text]:
    """Return the canvas behind a vertical axis with labels by row, counted from the bottom."""
    lines = []
    for i, dots in enumerate(canvas.lines()):
        label = labels.get(canvas.rows - 1 - i)
        axis = f"{label or '':>{MARGIN - 2}} {'┤' if label else '│'}"
        lines.append(Text(no_wrap=True).append(axis, DIM).append_text(dots))
        lines[-1].rstrip()
    return lines


def label_line(name: str, centers: Sequence[int], labels: Sequence[str], columns: int) -> Text:
    """Return labels centered on their columns, within the width."""
    line = ""
    for center, label in zip(centers, labels, strict=True):
        start = min(max(0, center - len(label) // 2), columns - len(label))
        line = line.ljust(start) + label
    return Text(f"{name:>{MARGIN - 2}}  {line}", no_wrap=True)


def decimals(ticks: Sequence[float]) -> int:
    """Return the decimals that distinguish adjacent ticks."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 0.01
    return next((n for n in range(6) if round(step, n) == round(step, 8)), 6)
