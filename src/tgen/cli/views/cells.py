"""A heat map in a terminal: digits, blocks or lists, what fits; and words about what is cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from tgen.cli.views.colours import colour, glow
from tgen.cli.views.heatmap import HeatMap
from tgen.cli.views.labels import cut

Cells = Literal["auto", "num", "block", "list"]

_HEAD = 14  # columns of a row's number and label
_DIGITS = 3  # columns of a weight in percent
_ROWS = 40  # drawn unless others are asked for: the last
_STACKED = 6  # characters of a label that stands upright
_LISTED = 4  # keys named in a line
_LEAST = 0.005  # weights below are written ·
_MARKS = " ·:-=+*#%@"  # shades where there is no colour
_SHADES = 64  # different ones in a picture
_TALLEST, _WIDEST = 64, 4  # of pictures that are no squares: rows, and columns for each of theirs


@dataclass(frozen=True)
class _Blocks:
    """Two rows a line: the upper and the lower half of ▀; without colour a mark for each cell."""

    heat: HeatMap
    shades: NDArray[np.float32]  # (rows, columns), NaN where nothing is drawn
    rows: Sequence[int]  # of the heat map, where each of these begins

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        coloured = console.color_system is not None and not console.no_color
        levels = np.where(np.isnan(self.shades), -1, np.round(self.shades * (_SHADES - 1)))
        levels = levels.astype(int)
        step = 2 if coloured else 1
        for i in range(0, len(levels), step):
            yield Segment(_head(self.heat, self.rows[i]))
            if coloured:
                lower = levels[i + 1] if i + 1 < len(levels) else np.full_like(levels[i], -1)
                yield from _runs(levels[i].tolist(), lower.tolist())
            else:
                marks = (level * len(_MARKS) // _SHADES for level in levels[i].tolist())
                yield Segment("".join(_MARKS[m] if m >= 0 else " " for m in marks).rstrip())
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
    return Color.from_rgb(*colour(level / (_SHADES - 1)))


def draw(
    heat: HeatMap,
    *,
    cells: Cells,
    width: int,
    is_terminal: bool,
    rows: range | None = None,
    columns: range | None = None,
    top: int = _LISTED,
) -> list[Text | _Blocks]:
    """Lines of at most `width` cells, and after them what is not shown.

    `auto` takes digits where all columns fit, else blocks at a terminal, else lists. Values that
    are no shares are always blocks.
    """
    n_rows, n_columns = heat.values.shape
    columns = range(n_columns) if columns is None else columns
    room = max(1, width - _HEAD)
    if not heat.percent:
        cells = "block"
    elif cells == "auto":
        fits = len(columns) * _DIGITS <= room
        cells = "num" if fits else "block" if is_terminal else "list"
    if rows is None:
        rows = range(n_rows) if cells == "block" else range(max(0, n_rows - _ROWS), n_rows)
    title = Text(heat.title, style="bold")
    if cells == "block":
        picture, pooled = _blocks(heat, rows, columns, room)
        said = [_legend(heat), *pooled]
        return [
            title,
            _ticks(columns, picture, heat, room),
            picture,
            *_lines(said, heat, rows, columns),
        ]
    if cells == "list":
        lines = [_listed(heat, row, columns, top) for row in rows]
        return [title, *lines, *_lines([], heat, rows, columns)]
    columns = columns[-(room // _DIGITS) :]
    picture_lines = _digits(heat, rows, columns, room)
    said = [f"{heat.unit}; · is below 0.5"]
    return [title, *picture_lines, *_lines(said, heat, rows, columns)]


def _lines(said: list[str], heat: HeatMap, rows: range, columns: range) -> list[Text]:
    n_rows, n_columns = heat.values.shape
    if len(rows) < n_rows:
        said = [*said, f"{_span(heat.row_name, rows)} of {n_rows}; --query chooses others"]
    if len(columns) < n_columns:
        words = f"{_span(heat.column_name, columns)} of {n_columns}"
        if heat.percent and len(rows):
            inside = heat.values[rows.start : rows.stop, columns.start : columns.stop]
            words += f" hold {float(inside.sum()) / len(rows):.0%} of these rows' weight"
        said = [*said, f"{words}; --keys chooses others"]
    return [Text(line, style="dim") for line in said]


def _span(name: str, shown: range) -> str:
    plural = "queries" if name == "query" else f"{name}s"
    last = f" to {shown[-1]}" if len(shown) > 1 else ""
    return f"{plural if len(shown) > 1 else name} {shown.start}{last}"


def _head(heat: HeatMap, row: int) -> str:
    label = heat.rows[row]
    text = str(row) if label == str(row) else f"{row:>4} {cut(label, _HEAD - 6)}"
    return set_cell_size(text if label != str(row) else f"{row:>4}", _HEAD)


def _digits(heat: HeatMap, rows: range, columns: range, room: int) -> list[Text]:
    """A header of numbers and labels, then a line a row."""
    longest = max((cell_len(heat.columns[j]) for j in columns), default=1)
    numbers = len(str(columns[-1])) if len(columns) else 1
    cell = max(_DIGITS, min(max(longest, numbers) + 1, room // max(1, len(columns))))
    labels = [heat.columns[j] for j in columns]
    lines = []
    if cell > numbers:
        lines.append("".join(f"{j:>{cell}}" for j in columns))
    else:  # numbers stand upright too
        lines += _upright([str(j) for j in columns], numbers, cell)
    if cell >= min(longest + 1, _STACKED):
        lines.append("".join(_right(cut(label, cell - 1), cell) for label in labels))
    else:
        lines += _upright(labels, _STACKED, cell)
    heads = [" " * _HEAD] * (len(lines) - 1) + [set_cell_size(heat.row_name, _HEAD)]
    texts = [
        Text(head + line, style="bold", no_wrap=True)
        for head, line in zip(heads, lines, strict=True)
    ]
    shades = heat.shades()
    for row in rows:
        text = Text(_head(heat, row), no_wrap=True)
        for j in columns:
            if heat.causal and j > row:
                text.append(" " * cell)
                continue
            value = float(heat.values[row, j])
            digits = f"{value * 100:.0f}" if value >= _LEAST else "·"
            shown = digits if cell == _DIGITS else f"{digits} "
            text.append(f"{shown:>{cell}}", glow(float(shades[row, j])))
        text.rstrip()
        texts.append(text)
    return texts


def _right(text: str, cell: int) -> str:
    return " " * (cell - cell_len(text)) + text


def _upright(labels: Sequence[str], height: int, cell: int) -> list[str]:
    """Labels written downwards, ending on one line."""
    shown = [label if len(label) <= height else label[: height - 1] + "…" for label in labels]
    tall = max(map(len, shown), default=0)
    padded = [label.rjust(tall) for label in shown]
    return ["".join(_right(label[i], cell) for label in padded) for i in range(tall)]


def _blocks(heat: HeatMap, rows: range, columns: range, room: int) -> tuple[_Blocks, list[str]]:
    """The picture, made smaller by the least whole number that lets it fit."""
    shades = heat.shades()
    if heat.causal:
        n_rows, n_columns = shades.shape
        shades = np.where(np.arange(n_columns) > np.arange(n_rows)[:, None], np.nan, shades)
    part = shades[rows.start : rows.stop, columns.start : columns.stop]
    factor = -(-len(columns) // room)
    if not heat.percent:  # of numbers with a sign the largest would mislead
        return _sampled(heat, part, rows, factor, room)
    if factor == 1:
        return _Blocks(heat, part, list(rows)), []
    starts = list(rows)[::factor]
    height, width = (-(-n // factor) * factor for n in part.shape)
    padded = np.full((height, width), np.nan, np.float32)
    padded[: part.shape[0], : part.shape[1]] = part
    tiles = padded.reshape(height // factor, factor, width // factor, factor)
    filled = np.where(np.isnan(tiles), -1, tiles).max(axis=(1, 3))
    pooled = np.where(filled < 0, np.nan, filled).astype(np.float32)
    said = f"each cell is the largest of {factor} x {factor}"
    return _Blocks(heat, pooled, starts), [said]


def _sampled(
    heat: HeatMap, part: NDArray[np.float32], rows: range, factor: int, room: int
) -> tuple[_Blocks, list[str]]:
    """At most _TALLEST rows; few columns are drawn wide."""
    every = -(-len(part) // _TALLEST)
    drawn = part[::every, ::factor]
    said = []
    if every > 1:
        said.append(f"every {every}. {heat.row_name} is drawn")
    if factor > 1:
        said.append(f"every {factor}. {heat.column_name} is drawn")
    times = max(1, min(_WIDEST, room // drawn.shape[1]))
    return _Blocks(heat, np.repeat(drawn, times, axis=1), list(rows)[::every]), said


def _ticks(columns: range, picture: _Blocks, heat: HeatMap, room: int) -> Text:
    """Numbers of every tenth column."""
    n = picture.shades.shape[1]
    factor = -(-len(columns) // room)
    times = max(1, n // len(columns))
    line = ""
    for j in range(0, n, 10):
        number = str(columns[j * factor // times])
        if len(line) <= j and j + len(number) <= n:
            line = line.ljust(j) + number
    return Text(set_cell_size(heat.row_name, _HEAD) + line, style="dim", no_wrap=True)


def _legend(heat: HeatMap) -> str:
    low, high = (f"{v:.0%}" if heat.percent else f"{v:g}" for v in (heat.low, heat.high))
    scale = {"sqrt": "by its square root", "log": "by its logarithm", "linear": "evenly"}
    return f"dark is {low}, light {high}, {scale[heat.scale]}; columns are {heat.column_name}s"


def _listed(heat: HeatMap, row: int, columns: range, top: int) -> Text:
    """A row in words: its largest values, and what the others hold."""
    shown = [j for j in columns if not (heat.causal and j > row)]
    values = heat.values[row]
    best = sorted(shown, key=lambda j: -values[j])[:top]
    parts = [f"{j} {heat.columns[j]} {_short(values[j])}" for j in best]
    rest = [j for j in range(heat.values.shape[1]) if not (heat.causal and j > row)]
    others = len(rest) - len(best)
    if others:
        left = float(values[rest].sum() - values[best].sum())
        parts.append(f"rest {_short(max(left, 0))} ({others})")
    return Text(f"{row:>4} {heat.rows[row]} -> " + "  ".join(parts), overflow="fold")


def _short(share: float) -> str:
    return f"{share:.2f}".removeprefix("0")
