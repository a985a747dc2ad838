"""A heat map in a terminal: digits, blocks or lists, what fits; and words about what is cut."""

from typing import Literal

from rich.text import Text

from tgen.cli.inspect.heatmap.blocks import Blocks, blocks
from tgen.cli.inspect.heatmap.digits import DIGITS, digits
from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.render.token_labels import MARGIN

Cells = Literal["auto", "num", "block", "list"]

_ROWS = 40  # drawn at a terminal unless others are asked for: the last
_LISTED = 4  # keys named in a line


def draw_cells(
    heat: HeatMap,
    *,
    cells: Cells,
    width: int,
    is_terminal: bool,
    coloured: bool = False,
    rows: range | None = None,
    columns: range | None = None,
    top: int = _LISTED,
) -> list[Text | Blocks]:
    """Lines of at most `width` cells but for lists, and after them what is not shown.

    `auto` takes digits where all columns fit, else blocks at a terminal, else lists. Values that
    are no shares are always blocks. `coloured` says whether the terminal has the ramp's colours.
    """
    n_rows, n_columns = heat.values.shape
    chosen = range(n_columns) if columns is None else columns
    room = max(1, width - MARGIN)
    if not heat.percent:
        cells = "block"
    elif cells == "auto":
        fits = len(chosen) * DIGITS <= room
        cells = "num" if fits else "block" if is_terminal else "list"
    cut = chosen[-max(1, room // DIGITS) :] if cells == "num" else chosen
    if rows is None:
        last = _ROWS if is_terminal and cells != "block" else n_rows
        first = max(0, n_rows - last)
        if heat.causal and cut.start > 1:  # the rows above would be empty
            first = max(first, cut.start)
        rows = range(first, n_rows)
    drawn: list[Text | Blocks]
    if cells == "block":
        drawn, said = blocks(heat, rows, cut, room=room, coloured=coloured)
    elif cells == "list":
        drawn = [_listed(heat, row, cut, top) for row in rows]
        said = [
            f"each {heat.row_name} -> its largest {heat.column_name}s with their shares; the "
            "rest's, and in brackets how many they are"
        ]
    else:
        drawn = [*digits(heat, rows, cut, room=room)]
        said = [f"{heat.unit}; · is below 0.5"]
    return [Text(heat.title, style="bold"), *drawn, *_captions(said, heat, rows, cut)]


def _captions(said: list[str], heat: HeatMap, rows: range, columns: range) -> list[Text]:
    """What the picture means, and what of the matrix it leaves out."""
    n_rows, n_columns = heat.values.shape
    if len(rows) < n_rows:
        said = [*said, f"{_span(heat.row_name, rows)} of {n_rows}; --query chooses others"]
    if len(columns) < n_columns:
        held = ""
        if heat.percent:
            inside = heat.values[rows.start : rows.stop, columns.start : columns.stop]
            held = f"{float(inside.sum()) / max(len(rows), 1):.0%} of these rows' weight"
        if heat.percent and columns == range(1, n_columns):
            left = float(heat.values[rows.start : rows.stop, 0].sum()) / max(len(rows), 1)
            words = f"the first {heat.column_name} is left out: it holds {left:.0%}"
            said = [*said, f"{words}, the others {held}"]
        else:
            words = f"{_span(heat.column_name, columns)} of {n_columns}"
            words += f" hold{'s' * (len(columns) == 1)} {held}" if held else ""
            said = [*said, f"{words}; --keys chooses others"]
    return [Text(line, style="dim") for line in said]


def _span(name: str, shown: range) -> str:
    if len(shown) == 1:
        return f"{name} {shown.start}"
    plural = "queries" if name == "query" else f"{name}s"
    return f"{plural} {shown.start} to {shown[-1]}"


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
