"""A heat map as digits: what each row looks at, in percent."""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.render.colormap import highlight
from tgen.cli.render.token_labels import MARGIN, cut, row_label

DIGITS = 3  # columns of a number at least
_STACKED = 6  # characters of a label that stands upright
_LEAST = 0.005  # weights below are written ·


def digits(heat: HeatMap, rows: range, columns: range, *, room: int) -> list[Text]:
    """A header of numbers and labels, then a line a row; `room` is what all cells may take."""
    longest = max((cell_len(heat.columns[j]) for j in columns), default=1)
    numbers = len(str(columns[-1])) if len(columns) else 1
    cell = max(DIGITS, min(max(longest, numbers) + 1, room // max(1, len(columns))))
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
    heads = [" " * MARGIN] * (len(lines) - 1) + [set_cell_size(heat.row_name, MARGIN)]
    header = [Text(h + line, "bold", no_wrap=True) for h, line in zip(heads, lines, strict=True)]
    return [*header, *(_row(heat, row, columns, cell) for row in rows)]


def _row(heat: HeatMap, row: int, columns: range, cell: int) -> Text:
    text = Text(row_label(row, heat.rows[row]), no_wrap=True)
    shades = heat.shades(heat.values[row])
    for j in columns:
        if heat.causal and j > row:
            break
        value = float(heat.values[row, j])
        number = f"{value * 100:.0f}" if value >= _LEAST else "·"
        shown = number if cell == DIGITS else f"{number} "
        text.append(f"{shown:>{cell}}", highlight(float(shades[j])))
    text.rstrip()
    return text


def _right(text: str, cell: int) -> str:
    return " " * (cell - cell_len(text)) + text


def _upright(labels: Sequence[str], height: int, cell: int) -> list[str]:
    """Labels written downwards, ending on one line."""
    shown = [label if len(label) <= height else label[: height - 1] + "…" for label in labels]
    tall = max(map(len, shown), default=0)
    padded = [label.rjust(tall) for label in shown]
    return ["".join(_right(label[i], cell) for label in padded) for i in range(tall)]
