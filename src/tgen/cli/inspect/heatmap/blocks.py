"""A heat map as blocks: two rows per line in color (▀), or one character per cell without."""

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

from tgen.cli.inspect.heatmap.heatmap import LOG_MIN, HeatMap
from tgen.cli.render.colormap import terminal_color
from tgen.cli.render.token_labels import MARGIN, row_label

_CHARACTERS = " ·:-=+*#%@"  # shades without color
_N_SHADES = 64
_MAX_DRAWN, _MAX_REPEAT = 64, 4  # signed matrices: rows drawn, and columns per value


@dataclass(frozen=True)
class Blocks:
    """A Rich renderable: half a line per row with color, else one character per cell."""

    heat: HeatMap
    shades: NDArray[np.float32]  # (rows, columns), NaN where masked
    rows: Sequence[int]  # index in the heat map of each row's first source row

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        has_color = console.color_system is not None and not console.no_color
        levels = np.where(np.isnan(self.shades), -1, np.round(self.shades * (_N_SHADES - 1)))
        levels = levels.astype(int)
        step = 2 if has_color else 1
        for i in range(0, len(levels), step):
            yield Segment(row_label(self.rows[i], self.heat.rows[self.rows[i]]))
            if has_color:
                lower = levels[i + 1] if i + 1 < len(levels) else np.full_like(levels[i], -1)
                yield from _color_runs(levels[i].tolist(), lower.tolist())
            else:
                indices = (level * len(_CHARACTERS) // _N_SHADES for level in levels[i].tolist())
                yield Segment("".join(_CHARACTERS[k] if k >= 0 else " " for k in indices).rstrip())
            yield Segment.line()


def _color_runs(upper: list[int], lower: list[int]) -> Iterator[Segment]:
    """Yield one segment per run of equal colors."""
    start = 0
    for j in range(1, len(upper) + 1):
        if j == len(upper) or (upper[j], lower[j]) != (upper[start], lower[start]):
            character, style = _half_blocks(upper[start], lower[start])
            yield Segment(character * (j - start), style)
            start = j


@cache
def _half_blocks(upper: int, lower: int) -> tuple[str, Style | None]:
    """Return the character and style of two cells, one above the other; -1 is masked."""

    def color(level: int) -> Color:
        return terminal_color(level / (_N_SHADES - 1))

    if upper < 0 and lower < 0:
        return " ", None
    if upper < 0:
        return "▄", Style(color=color(lower))
    return "▀", Style(color=color(upper), bgcolor=color(lower) if lower >= 0 else None)


def draw_blocks(
    heat: HeatMap, rows: range, columns: range, *, room: int, has_color: bool
) -> tuple[list[Text | Blocks], list[str]]:
    """Return the picture, downscaled by the smallest integer that lets it fit, and notes."""
    shades = np.where(heat.visible(), heat.shades(), np.float32(np.nan))
    part = shades[rows.start : rows.stop, columns.start : columns.stop]
    factor = -(-len(columns) // room)
    if not heat.percent:  # the maximum of signed values would mislead
        picture, notes = _subsample(heat, part, rows, factor, room)
    elif factor == 1:
        picture, notes = Blocks(heat, part, list(rows)), []
    else:
        few_rows = len(rows) <= _MAX_DRAWN and len(rows) < len(heat.rows)  # selected by --query
        picture, notes = _max_pool(heat, part, rows, 1 if few_rows else factor, factor)
    return [_column_ticks(columns, picture, factor), picture], [_legend(heat, has_color), *notes]


def _max_pool(
    heat: HeatMap, part: NDArray[np.float32], rows: range, down: int, across: int
) -> tuple[Blocks, list[str]]:
    height, width = -(-len(part) // down) * down, -(-part.shape[1] // across) * across
    padded = np.full((height, width), np.nan, np.float32)
    padded[: part.shape[0], : part.shape[1]] = part
    tiles = padded.reshape(height // down, down, width // across, across)
    maxima = np.where(np.isnan(tiles), -1, tiles).max(axis=(1, 3))
    pooled = np.where(maxima < 0, np.nan, maxima).astype(np.float32)
    return Blocks(heat, pooled, list(rows)[::down]), [f"each cell: maximum of {down} x {across}"]


def _subsample(
    heat: HeatMap, part: NDArray[np.float32], rows: range, factor: int, room: int
) -> tuple[Blocks, list[str]]:
    """Draw at most _MAX_DRAWN rows; where columns are few, each is drawn several cells wide."""
    row_step = -(-len(part) // _MAX_DRAWN)
    sample = part[::row_step, ::factor]
    notes = [
        f"1 in {step} {name}s is shown"
        for step, name in ((row_step, heat.row_name), (factor, heat.column_name))
        if step > 1
    ]
    repeat = max(1, min(_MAX_REPEAT, room // sample.shape[1]))
    return Blocks(heat, np.repeat(sample, repeat, axis=1), list(rows)[::row_step]), notes


def _column_ticks(columns: range, picture: Blocks, factor: int) -> Text:
    """Return a line with the column index above every tenth cell."""
    n = picture.shades.shape[1]
    repeat = max(1, n // len(columns))
    line = ""
    for j in range(0, n, 10):
        number = str(columns[j * factor // repeat])
        if len(line) <= j and j + len(number) <= n:
            line = line.ljust(j) + number
    return Text(set_cell_size(picture.heat.row_name, MARGIN) + line, style="dim", no_wrap=True)


def _legend(heat: HeatMap, has_color: bool) -> str:
    low, high = (f"{v:.0%}" if heat.percent else f"{v:g}" for v in (heat.low, heat.high))
    ends = f"‘{_CHARACTERS}’ from {low} to {high}"
    if has_color:
        ends = f"dark is {low}, light is {high} (NO_COLOR=1 draws characters)"
    scale = {
        "sqrt": "square-root scale",
        "log": f"log scale from {LOG_MIN:.2%}",
        "linear": "linear scale",
    }
    return f"{ends}, {scale[heat.scale]}; columns are {heat.column_name}s"
