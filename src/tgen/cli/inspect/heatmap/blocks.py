"""A heat map as blocks: two rows a line, the upper and the lower half of ▀; or marks as shades."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from rich.cells import set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from tgen.cli.inspect.heatmap.heatmap import LOG_LOW, HeatMap
from tgen.cli.render.colormap import color_at
from tgen.cli.render.token_labels import MARGIN, row_label

MARKS = " ·:-=+*#%@"  # shades where there is no colour
_SHADES = 64  # different ones in a picture
_TALLEST, _WIDEST = 64, 4  # of pictures that are no squares: rows, and columns for each of theirs


@dataclass(frozen=True)
class Blocks:
    """Lines for a console: with colour half a line a row, else a mark for each cell."""

    heat: HeatMap
    shades: NDArray[np.float32]  # (rows, columns), NaN where nothing is drawn
    rows: Sequence[int]  # of the heat map, where each of these begins

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        coloured = console.color_system is not None and not console.no_color
        levels = np.where(np.isnan(self.shades), -1, np.round(self.shades * (_SHADES - 1)))
        levels = levels.astype(int)
        step = 2 if coloured else 1
        for i in range(0, len(levels), step):
            yield Segment(row_label(self.rows[i], self.heat.rows[self.rows[i]]))
            if coloured:
                lower = levels[i + 1] if i + 1 < len(levels) else np.full_like(levels[i], -1)
                yield from _runs(levels[i].tolist(), lower.tolist())
            else:
                marks = (level * len(MARKS) // _SHADES for level in levels[i].tolist())
                yield Segment("".join(MARKS[m] if m >= 0 else " " for m in marks).rstrip())
            yield Segment.line()


def _runs(upper: list[int], lower: list[int]) -> Iterator[Segment]:
    """Neighbours of the same colours in one piece."""
    start = 0
    for j in range(1, len(upper) + 1):
        if j == len(upper) or (upper[j], lower[j]) != (upper[start], lower[start]):
            character, style = _halves(upper[start], lower[start])
            yield Segment(character * (j - start), style)
            start = j


@cache
def _halves(upper: int, lower: int) -> tuple[str, Style | None]:
    if upper < 0 and lower < 0:
        return " ", None
    if upper < 0:
        return "▄", Style(color=_rich(lower))
    return "▀", Style(color=_rich(upper), bgcolor=_rich(lower) if lower >= 0 else None)


def _rich(level: int) -> Color:
    return Color.from_rgb(*color_at(level / (_SHADES - 1)))


def blocks(
    heat: HeatMap, rows: range, columns: range, *, room: int, coloured: bool
) -> tuple[list[Text | Blocks], list[str]]:
    """The picture, made smaller by the least whole number that lets it fit; and what is to be said
    of it: its scale, and what was pooled."""
    shades = heat.shades()
    if heat.causal:
        n_rows, n_columns = shades.shape
        shades = np.where(np.arange(n_columns) > np.arange(n_rows)[:, None], np.nan, shades)
    part = shades[rows.start : rows.stop, columns.start : columns.stop]
    factor = -(-len(columns) // room)
    if not heat.percent:  # of numbers with a sign the largest would mislead
        picture, said = _sampled(heat, part, rows, factor, room)
    elif factor == 1:
        picture, said = Blocks(heat, part, list(rows)), []
    else:
        few = len(rows) <= _TALLEST and len(rows) < len(heat.rows)  # a window that was asked for
        picture, said = _pooled(heat, part, rows, 1 if few else factor, factor)
    return [_ticks(columns, picture, factor), picture], [_legend(heat, coloured), *said]


def _pooled(
    heat: HeatMap, part: NDArray[np.float32], rows: range, down: int, across: int
) -> tuple[Blocks, list[str]]:
    height, width = -(-len(part) // down) * down, -(-part.shape[1] // across) * across
    padded = np.full((height, width), np.nan, np.float32)
    padded[: part.shape[0], : part.shape[1]] = part
    tiles = padded.reshape(height // down, down, width // across, across)
    filled = np.where(np.isnan(tiles), -1, tiles).max(axis=(1, 3))
    pooled = np.where(filled < 0, np.nan, filled).astype(np.float32)
    said = f"each cell is the largest of {down} x {across}"
    return Blocks(heat, pooled, list(rows)[::down]), [said]


def _sampled(
    heat: HeatMap, part: NDArray[np.float32], rows: range, factor: int, room: int
) -> tuple[Blocks, list[str]]:
    """At most _TALLEST rows; few columns are drawn wide."""
    every = -(-len(part) // _TALLEST)
    drawn = part[::every, ::factor]
    said = []
    for step, name in ((every, heat.row_name), (factor, heat.column_name)):
        if step > 1:
            said.append(f"one {name} in {step} is drawn")
    times = max(1, min(_WIDEST, room // drawn.shape[1]))
    return Blocks(heat, np.repeat(drawn, times, axis=1), list(rows)[::every]), said


def _ticks(columns: range, picture: Blocks, factor: int) -> Text:
    """Numbers of every tenth column."""
    n = picture.shades.shape[1]
    times = max(1, n // len(columns))
    line = ""
    for j in range(0, n, 10):
        number = str(columns[j * factor // times])
        if len(line) <= j and j + len(number) <= n:
            line = line.ljust(j) + number
    return Text(set_cell_size(picture.heat.row_name, MARGIN) + line, style="dim", no_wrap=True)


def _legend(heat: HeatMap, coloured: bool) -> str:
    low, high = (f"{v:.0%}" if heat.percent else f"{v:g}" for v in (heat.low, heat.high))
    ends = f"‘{MARKS}’ from {low} to {high}"
    if coloured:
        ends = f"dark is {low}, light {high} (NO_COLOR=1 draws marks)"
    scale = {
        "sqrt": "by its square root",
        "log": f"by its logarithm from {LOG_LOW:.2%} on",
        "linear": "evenly",
    }
    return f"{ends}, {scale[heat.scale]}; columns are {heat.column_name}s"
