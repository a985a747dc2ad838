"""Curves over each other, independent of their output format, and in the terminal.

Each curve has a letter at its end, so that colors only repeat what letters show.
"""

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from tgen.drawing.braille_plot import DIM, MARGIN, Axis, Canvas, decimals, label_line, with_axis
from tgen.drawing.terminal_text import cut, one_line

_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_magenta")
_ROWS = 18
_MIN_COLUMNS = 40  # of the plot
_MAX_LABEL = 38  # columns of a label in the legend
_SKIPPED = 0.2  # share of the scale without effect on the loss axis: the start is too steep
_BAND_STEP = 3  # dots between the dots of an interval's ends
_BAND_ROOM = 0.5  # most that intervals add to either side of the loss axis: half its height


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line with a label; `low` and `high` are the ends of its interval."""

    label: str
    color: int  # equal for curves that belong together
    x: Sequence[float]  # ascending
    y: Sequence[float]
    low: Sequence[float] = field(default_factory=list)
    high: Sequence[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CurvePlot:
    """Curves with the names of both axes."""

    title: str
    x_name: str
    y_name: str
    curves: Sequence[Curve]  # each with at least one point

    def axes(self, x_dots: int, y_dots: int) -> tuple[Axis, Axis]:
        """Return the axes; the steep start of the curves and wide intervals go beyond them."""
        end = max(curve.x[-1] for curve in self.curves)
        losses = [
            y
            for curve in self.curves
            for x, y in zip(curve.x, curve.y, strict=True)
            if x >= _SKIPPED * end or x == curve.x[-1]
        ]
        lowest, highest = min(losses), max(losses)
        room = _BAND_ROOM * (highest - lowest) or math.inf
        ends = [y for curve in self.curves for y in (*curve.low[-1:], *curve.high[-1:])]
        low = max(min([lowest, *ends]), lowest - room)
        high = min(max([highest, *ends]), highest + room)
        margin = 0.05 * (high - low) or 0.05
        return (
            Axis(low=0.0, high=end, dots=x_dots),
            Axis(low=low - margin, high=high + margin, dots=y_dots),
        )

    def names(self) -> list[str]:
        """Return a letter per curve; "" for those beyond the alphabet."""
        return [*_LETTERS, *[""] * len(self.curves)][: len(self.curves)]


def tick_labels(axis: Axis, n: int) -> dict[float, str]:
    """Return at most `n` round values of an axis with their labels."""
    ticks = axis.ticks(n)
    digits = decimals(ticks)
    return {tick: f"{tick:,.{digits}f}" for tick in ticks}


def draw_curves(plot: CurvePlot, *, width: int) -> list[Text]:
    """Return the plot and its legend for a terminal, in lines of at most `width` columns."""
    if not plot.curves:
        return []
    columns = max(_MIN_COLUMNS, width - MARGIN)
    canvas = Canvas(columns, _ROWS)
    x, y = plot.axes(2 * columns, 4 * _ROWS)
    marked: set[tuple[int, int]] = set()
    styles = [_STYLES[curve.color % len(_STYLES)] for curve in plot.curves]
    lines = [_dots(x, y, curve.x, curve.y) for curve in plot.curves]
    for curve, line, style in reversed(list(zip(plot.curves, lines, styles, strict=True))):
        for ends in (curve.low, curve.high):
            for dot, row in _between(_dots(x, y, curve.x, ends), step=_BAND_STEP):
                canvas.dot(dot, row, style)
        canvas.line(line, style)
    for line, letter, style in zip(lines, plot.names(), styles, strict=True):
        dots = ((dot // 2, row // 4) for dot, row in _between(line, step=-2))
        free = (one for one in dots if 0 <= one[1] < _ROWS and one not in marked)
        if letter and (position := next(free, None)):
            marked.add(position)
            canvas.mark(2 * position[0], 4 * position[1], letter, style)
    y_labels = {y.dot(tick) // 4: label for tick, label in tick_labels(y, 6).items()}
    x_labels = tick_labels(x, max(2, columns // 12))
    centers = [x.dot(tick) // 2 for tick in x_labels]
    return [
        Text(f"{plot.y_name:>{MARGIN - 1}}", no_wrap=True),
        *with_axis(canvas, y_labels),
        Text(" " * (MARGIN - 1) + "└" + "─" * columns, DIM),
        label_line("", centers, list(x_labels.values()), columns),
        Text(plot.x_name.rjust(MARGIN + columns)),
        *_legend(plot, MARGIN + columns),
    ]


def _dots(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float]) -> list[tuple[int, int]]:
    return [(x.dot(a), y.dot(b)) for a, b in zip(xs, ys, strict=False)]


def _between(points: Sequence[tuple[int, int]], *, step: int) -> Iterator[tuple[int, int]]:
    """Yield dots of a line, every `step` from its start or, if negative, from its end."""
    if points:
        xs, ys = zip(*points, strict=True)
        ends = (xs[0], xs[-1] + 1) if step > 0 else (xs[-1], xs[0] - 1)
        for dot in range(*ends, step):
            row = np.interp(dot, xs, list(map(float, ys)))  # any number of a log
            yield dot, round(float(row.clip(-1, 4 * _ROWS)))


def _legend(plot: CurvePlot, width: int) -> Iterator[Text]:
    """Yield the letters with their labels, down the columns."""
    labels = [cut(one_line(curve.label), _MAX_LABEL) for curve in plot.curves]
    column = max(map(cell_len, labels)) + 4
    n_rows = -(-len(labels) // max(1, (width - 2) // column))
    for row in range(n_rows):
        line = Text("  ", no_wrap=True)
        for i in range(row, len(labels), n_rows):
            letter = plot.names()[i] or "·"
            style = _STYLES[plot.curves[i].color % len(_STYLES)]
            line.append(letter, style).append(f" {labels[i]}".ljust(column - 1))
        line.rstrip()
        yield line
