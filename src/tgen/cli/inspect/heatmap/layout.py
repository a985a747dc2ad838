"""Where everything stands in a picture of a heat map, whatever it is drawn with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size

from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.render.colormap import color_at, is_light

TITLE, TEXT, NUMBER = 15, 12, 11  # letters' sizes, in pixels like all that follows
INK, FAINT, PAPER = "#222222", "#707070", "#ffffff"
SCALES = {"sqrt": "square-root scale", "linear": "linear scale", "log": "log scale"}
_MARGIN, _GAP, _LINE, _BAR = 20, 6, 16, (200, 10)
_TICKS = {"sqrt": (0, 0.05, 0.25, 0.5, 1), "log": (1e-4, 1e-3, 0.01, 0.1, 1)}
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, kw_only=True)
class TextBox:
    """A text whose start, middle or end is at (x, y), halfway up its letters."""

    text: str
    x: float
    y: float
    anchor: Anchor = "start"
    size: int = TEXT
    ink: str = INK
    turned: bool = False  # read upwards


class Layout:
    """Where the matrix, the legend and all words are; `width_of` measures a text of a size."""

    def __init__(self, heat: HeatMap, width_of: Callable[[str, int], float]) -> None:
        n_rows, n_columns = heat.values.shape
        self.cell = min(max(1024 // max(n_rows, n_columns), 1), 40)
        self.space = int(self.cell > 20)  # left free beside and below a cell
        title = wrap(heat.title, max(80, n_columns * self.cell // 9))
        rows, columns = self._thinned(heat.rows), self._thinned(heat.columns)
        index = _GAP + round(width_of(str(max(n_rows, n_columns) - 1), TEXT))
        wide, high = (
            index + round(max(width_of(label, TEXT) for label in labels.values()))
            for labels in (rows, columns)
        )
        self.bar = (_MARGIN, _MARGIN + 20 * len(title) + _GAP, *_BAR)
        self.left, self.top = _MARGIN + _LINE + wide + 2 * _GAP, self.bar[1] + 3 * _LINE
        self.right, self.end = self.left + n_columns * self.cell, self.top + n_rows * self.cell
        below = self.end + _GAP + high + _LINE
        self.words = [
            *(TextBox(text=t, x=_MARGIN, y=28 + 20 * i, size=TITLE) for i, t in enumerate(title)),
            *_legend(heat, *self.bar),
            TextBox(text=heat.row_name, x=_MARGIN + 8, y=self.top, anchor="end", turned=True),
            TextBox(text=heat.column_name, x=self.left, y=below),
            *self._labels(rows, index, turned=False),
            *self._labels(columns, index, turned=True),
        ]
        reach = (w.x + width_of(w.text, w.size) for w in self.words if w.anchor == "start")
        self.width = round(max(self.right, *reach)) + _MARGIN
        self.height = below + _LINE // 2 + _MARGIN
        numbers = list(self._numbers(heat)) if self.space else []
        if max((width_of(w.text, w.size) for w in numbers), default=0) + 3 <= self.cell:
            self.words += numbers

    def _thinned(self, labels: Sequence[str]) -> dict[int, str]:
        """As many as fit beside cells; empty where one is the index itself."""
        every = next(n for n in (1, 2, 5, 10, 20) if n * self.cell >= 14)
        return {i: _cut(labels[i], i) for i in range(0, len(labels), every)}

    def _labels(self, labels: dict[int, str], index: int, *, turned: bool) -> Iterator[TextBox]:
        for i, label in labels.items():
            along = (i + 0.5) * self.cell
            for text, ink, away in ((str(i), FAINT, _GAP), (label, INK, _GAP + index)):
                x, y = self.left - away, self.top + along
                if turned:
                    x, y = self.left + along, self.end + away
                yield TextBox(text=text, x=x, y=y, anchor="end", ink=ink, turned=turned)

    def _numbers(self, heat: HeatMap) -> Iterator[TextBox]:
        """Each cell's value, in percent or to 2 places, a dot for what rounds to 0 %."""
        shades = heat.shades()
        for row, column in np.argwhere(build_layout(heat)).tolist():
            value = float(heat.values[row, column])
            text = f"{100 * value:z.0f}" if heat.percent else f"{value:z.2f}"
            yield TextBox(
                text="·" if heat.percent and text == "0" else text,
                x=self.left + (column + 0.5) * self.cell - self.space / 2,
                y=self.top + (row + 0.5) * self.cell - self.space / 2,
                anchor="middle",
                size=NUMBER,
                ink="#000000" if is_light(color_at(float(shades[row, column]))) else "#ffffff",
            )


def build_layout(heat: HeatMap) -> NDArray[np.bool_]:
    """Which cells there are: all, or those that are not right of the diagonal."""
    there = np.ones(heat.values.shape, np.bool_)
    return np.tril(there) if heat.causal else there


def ticks(heat: HeatMap) -> list[float]:
    """Values to name beside a legend, the darkest and the lightest among them."""
    parts = _TICKS.get(heat.scale, (0, 0.25, 0.5, 0.75, 1))
    return [heat.low + part * (heat.high - heat.low) for part in parts]


def named(index: int, labels: Sequence[str]) -> str:
    """A row's or a column's index with its label, once where they are the same."""
    return f"{index} {labels[index]}" if labels[index] != str(index) else labels[index]


def pixels(heat: HeatMap) -> NDArray[np.uint8]:
    """Each cell's red, green and blue as (rows, columns, 3), white where there is none."""
    image = np.full((*heat.values.shape, 3), 255, np.uint8)
    there = build_layout(heat)
    image[there] = [color_at(shade) for shade in heat.shades()[there].tolist()]
    return image


def _legend(heat: HeatMap, x: int, y: int, width: int, height: int) -> Iterator[TextBox]:
    name = ", ".join(part for part in (heat.unit, SCALES[heat.scale]) if part)
    yield TextBox(text=name, x=x + width + 2 * _GAP, y=y + height / 2)
    values = ticks(heat)
    shades = heat.shades(np.array(values, np.float32)).tolist()
    anchors: list[Anchor] = ["start", "middle", "middle", "middle", "end"]
    for value, shade, anchor in zip(values, shades, anchors, strict=True):
        text = f"{100 * value if heat.percent else value:z.3g}"
        at = {"x": x + shade * width, "y": y + height + 10}
        yield TextBox(text=text, **at, anchor=anchor, ink=FAINT)


def _cut(label: str, index: int) -> str:
    if label == str(index):
        return ""
    return label if cell_len(label) <= 24 else set_cell_size(label, 23).rstrip() + "…"
