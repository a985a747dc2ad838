"""A heat map in the terminal: percentages, blocks or lists, and notes about what is not shown.

With color, a line of blocks (▀) shows two rows; without, each cell is one character.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from tgen.drawing import Cells
from tgen.drawing.colormap import highlight, terminal_color
from tgen.drawing.heat_map import LOG_MIN, SCALES, HeatMap, indexed_label
from tgen.drawing.terminal_text import MARGIN, cut, row_label

_CHARACTERS = " ·:-=+*#%@"  # shades without color
_N_SHADES = 64
_MAX_DRAWN, _MAX_REPEAT = 64, 4  # signed matrices: rows drawn, and columns per value
_MAX_ROWS = 40  # at a terminal, unless rows are selected: the last ones
_TOP = 4  # values per line of a list
_MIN_DIGITS = 3  # columns of a number
_VERTICAL = 6  # characters of a vertical label
_MIN_SHARE = 0.005  # smaller shares are written ·


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
    for cells, run in groupby(zip(upper, lower, strict=True)):
        character, style = _half_blocks(*cells)
        yield Segment(character * len(list(run)), style)


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
    scale = SCALES[heat.scale] + (f" from {LOG_MIN:.2%}" if heat.scale == "log" else "")
    return f"{ends}, {scale}; columns are {heat.column_name}s"


def draw_heat_map(
    heat: HeatMap,
    *,
    cells: Cells,
    width: int,
    is_terminal: bool,
    has_color: bool = False,
    rows: range | None = None,
    columns: range | None = None,
    top: int = _TOP,
) -> list[Text | Blocks]:
    """Return lines of at most `width` columns (lists may be longer), then notes.

    `auto` chooses percentages where all columns fit, else blocks at a terminal, else lists. Values
    that are not shares are always drawn as blocks.
    """
    n_rows, n_columns = heat.values.shape
    selected = range(n_columns) if columns is None else columns
    room = max(1, width - MARGIN)
    if not heat.percent:
        cells = "block"
    elif cells == "auto":
        fits = len(selected) * _digits(heat) <= room
        cells = "num" if fits else "block" if is_terminal else "list"
    visible = selected[-max(1, room // _digits(heat)) :] if cells == "num" else selected
    if rows is None:
        limit = _MAX_ROWS if is_terminal and cells != "block" else n_rows
        first = max(0, n_rows - limit)
        if heat.causal and visible.start > 1:  # earlier rows would be empty
            first = max(first, visible.start)
        rows = range(first, n_rows)
    lines: list[Text | Blocks]
    if cells == "block":
        lines, notes = draw_blocks(heat, rows, visible, room=room, has_color=has_color)
    elif cells == "list":
        not_masked = heat.visible()
        lines = [_list_line(heat, row, not_masked[row], visible, top) for row in rows]
        notes = [f"each {heat.row_name} -> its largest {heat.column_name}s and their shares"]
        if heat.causal:
            notes[0] += "; rest: the sum of the others (their number)"
    else:
        lines = [*_percent_lines(heat, rows, visible, room=room)]
        notes = [f"{heat.unit}; · is below 0.5"]
    notes += _range_notes(heat, rows, visible)
    return [Text(heat.title, style="bold"), *lines, *(Text(note, style="dim") for note in notes)]


def _digits(heat: HeatMap) -> int:
    """Return the columns of a number; where several of a row may be large, with a space."""
    longest = max(len(f"{bound * 100:.0f}") for bound in (heat.low, heat.high))
    return max(_MIN_DIGITS, longest) + (not heat.causal)


def _range_notes(heat: HeatMap, rows: range, columns: range) -> list[str]:
    """Return notes about rows and columns that are not shown."""
    n_rows, n_columns = heat.values.shape
    notes = []
    if len(rows) < n_rows:
        notes.append(f"{_range_name(heat.row_name, rows)} of {n_rows}; --query selects others")
    if len(columns) < n_columns:
        share = ""
        if heat.percent and heat.causal:
            visible = heat.values[rows.start : rows.stop, columns.start : columns.stop]
            share = f"{float(visible.sum()) / max(len(rows), 1):.0%} of these rows' total"
        if share and columns == range(1, n_columns):
            hidden = float(heat.values[rows.start : rows.stop, 0].sum()) / max(len(rows), 1)
            notes.append(
                f"the first {heat.column_name} is hidden: it has {hidden:.0%}, the others {share}"
            )
        else:
            verb = "has" if len(columns) == 1 else "have"
            has = f" {verb} {share}" if share else ""
            name = _range_name(heat.column_name, columns)
            notes.append(f"{name} of {n_columns}{has}; --keys selects others")
    return notes


def _range_name(name: str, positions: range) -> str:
    if len(positions) == 1:
        return f"{name} {positions.start}"
    plural = "queries" if name == "query" else f"{name}s"
    return f"{plural} {positions.start} to {positions[-1]}"


def _list_line(
    heat: HeatMap, row: int, visible: NDArray[np.bool_], columns: range, top: int
) -> Text:
    """Return a row as a list of its largest visible values and the sum of the others."""
    values = heat.values[row]
    available = np.flatnonzero(visible).tolist()
    best = sorted((j for j in available if j in columns), key=lambda j: -values[j])[:top]
    parts = [f"{j} {heat.columns[j]} {_share(values[j])}" for j in best]
    n_others = len(available) - len(best)
    if n_others and heat.causal:
        rest = float(values[available].sum() - values[best].sum())
        parts.append(f"rest {_share(max(rest, 0))} ({n_others})")
    name = " " * (4 - len(str(row))) + indexed_label(row, heat.rows)
    return Text(f"{name} -> " + "  ".join(parts), overflow="fold")


def _share(share: float) -> str:
    return f"{share:z.2f}".removeprefix("0")


def _percent_lines(heat: HeatMap, rows: range, columns: range, *, room: int) -> list[Text]:
    """Return a header of positions and labels, and one line per row; `room`: columns of all
    cells."""
    longest = max((cell_len(heat.columns[j]) for j in columns), default=1)
    digits = len(str(columns[-1])) if len(columns) else 1
    cell = max(_digits(heat), min(max(longest, digits) + 1, room // max(1, len(columns))))
    labels = [heat.columns[j] for j in columns]
    lines = []
    if cell > digits:
        lines.append("".join(f"{j:>{cell}}" for j in columns))
    else:
        lines += _vertical([str(j) for j in columns], digits, cell)
    if labels == [str(j) for j in columns]:
        pass  # written above
    elif cell >= min(longest + 1, _VERTICAL):
        lines.append("".join(_right_aligned(cut(label, cell - 1), cell) for label in labels))
    else:
        lines += _vertical(labels, _VERTICAL, cell)
    margins = [" " * MARGIN] * (len(lines) - 1) + [set_cell_size(heat.row_name, MARGIN)]
    header = [Text(m + line, "bold", no_wrap=True) for m, line in zip(margins, lines, strict=True)]
    visible = heat.visible()
    return [*header, *(_percent_line(heat, row, visible[row], columns, cell) for row in rows)]


def _percent_line(
    heat: HeatMap, row: int, visible: NDArray[np.bool_], columns: range, cell: int
) -> Text:
    text = Text(row_label(row, heat.rows[row]), no_wrap=True)
    shades = heat.shades(heat.values[row])
    for j in columns:
        if not visible[j]:
            text.append(" " * cell)
            continue
        value = float(heat.values[row, j])
        number = f"{value * 100:.0f}" if abs(value) >= _MIN_SHARE else "·"
        number += "" if cell == _digits(heat) else " "
        text.append(f"{number:>{cell}}", highlight(float(shades[j])))
    text.rstrip()
    return text


def _right_aligned(text: str, cell: int) -> str:
    return " " * (cell - cell_len(text)) + text


def _vertical(labels: Sequence[str], max_height: int, cell: int) -> list[str]:
    """Return lines with the labels written downward, aligned at the bottom."""
    shown = [
        label if len(label) <= max_height else label[: max_height - 1] + "…" for label in labels
    ]
    height = max(map(len, shown), default=0)
    padded = [label.rjust(height) for label in shown]
    return ["".join(_right_aligned(label[i], cell) for label in padded) for i in range(height)]
