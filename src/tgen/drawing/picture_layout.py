"""The positions of a heat map's cells, legend and texts in a picture, in pixels."""

from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap

import numpy as np

from tgen.drawing.colormap import color_at, is_light
from tgen.drawing.heat_map import SCALES, HeatMap, legend_values
from tgen.drawing.picture_text import (
    DIM_COLOR,
    NUMBER_SIZE,
    TEXT_COLOR,
    TEXT_SIZE,
    TITLE_SIZE,
    Anchor,
    TextBox,
)
from tgen.drawing.terminal_text import cut

_MARGIN, _GAP, _LINE, _BAR = 20, 6, 16, (200, 10)


class Layout:
    """Positions of the matrix, the legend bar (x, y, width, height) and all texts."""

    def __init__(self, heat: HeatMap, text_width: Callable[[str, int], float]) -> None:
        """Lay out a heat map; `text_width` measures a text in a font size."""
        n_rows, n_columns = heat.values.shape
        self.cell = min(max(1024 // max(n_rows, n_columns), 1), 40)
        self.gap = int(self.cell > 20)  # between cells
        title = wrap(heat.title, max(80, n_columns * self.cell // 9))
        rows, columns = self._visible_labels(heat.rows), self._visible_labels(heat.columns)
        index_width = _GAP + round(text_width(str(max(n_rows, n_columns) - 1), TEXT_SIZE))
        rows_width, columns_height = (
            index_width + round(max(text_width(label, TEXT_SIZE) for label in labels.values()))
            for labels in (rows, columns)
        )
        self.bar = (_MARGIN, _MARGIN + 20 * len(title) + _GAP, *_BAR)
        self.left, self.top = _MARGIN + _LINE + rows_width + 2 * _GAP, self.bar[1] + 3 * _LINE
        self.right, self.bottom = self.left + n_columns * self.cell, self.top + n_rows * self.cell
        below = self.bottom + _GAP + columns_height + _LINE
        title_lines = (
            TextBox(text=line, x=_MARGIN, y=28 + 20 * i, size=TITLE_SIZE)
            for i, line in enumerate(title)
        )
        self.texts = [
            *title_lines,
            *_legend(heat, *self.bar),
            TextBox(text=heat.row_name, x=_MARGIN + 8, y=self.top, anchor="end", rotated=True),
            TextBox(text=heat.column_name, x=self.left, y=below),
            *self._labels(rows, index_width, rotated=False),
            *self._labels(columns, index_width, rotated=True),
        ]
        ends = (t.x + text_width(t.text, t.size) for t in self.texts if t.anchor == "start")
        self.width = round(max(self.right, *ends)) + _MARGIN
        self.height = below + _LINE // 2 + _MARGIN
        numbers = list(self._numbers(heat)) if self.gap else []
        if max((text_width(t.text, t.size) for t in numbers), default=0) + 3 <= self.cell:
            self.texts += numbers

    def _visible_labels(self, labels: Sequence[str]) -> dict[int, str]:
        """Return as many labels as fit; "" where a label is the index itself."""
        step = next(n for n in (1, 2, 5, 10, 20) if n * self.cell >= 14)
        shown = {i: labels[i] for i in range(0, len(labels), step)}
        return {i: "" if text == str(i) else cut(text, 24) for i, text in shown.items()}

    def _labels(
        self, labels: dict[int, str], index_width: int, *, rotated: bool
    ) -> Iterator[TextBox]:
        for i, name in labels.items():
            offset = (i + 0.5) * self.cell
            for text, color, distance in (
                (str(i), DIM_COLOR, _GAP),
                (name, TEXT_COLOR, _GAP + index_width),
            ):
                x, y = self.left - distance, self.top + offset
                if rotated:
                    x, y = self.left + offset, self.bottom + distance
                yield TextBox(text=text, x=x, y=y, anchor="end", color=color, rotated=rotated)

    def _numbers(self, heat: HeatMap) -> Iterator[TextBox]:
        """Yield each cell's value, in percent or with 2 decimals; a dot for 0 percent."""
        shades = heat.shades()
        for row, column in np.argwhere(heat.visible()).tolist():
            value = float(heat.values[row, column])
            text = f"{100 * value:z.0f}" if heat.percent else f"{value:z.2f}"
            background = color_at(float(shades[row, column]))
            yield TextBox(
                text="·" if heat.percent and text == "0" else text,
                x=self.left + (column + 0.5) * self.cell - self.gap / 2,
                y=self.top + (row + 0.5) * self.cell - self.gap / 2,
                anchor="middle",
                size=NUMBER_SIZE,
                color="#000000" if is_light(background) else "#ffffff",
            )


def _legend(heat: HeatMap, x: int, y: int, width: int, height: int) -> Iterator[TextBox]:
    name = ", ".join(part for part in (heat.unit, SCALES[heat.scale]) if part)
    yield TextBox(text=name, x=x + width + 2 * _GAP, y=y + height / 2)
    values = legend_values(heat)
    shades = heat.shades(np.array(values, np.float32)).tolist()
    anchors: list[Anchor] = ["start", "middle", "middle", "middle", "end"]
    for value, shade, anchor in zip(values, shades, anchors, strict=True):
        text = f"{100 * value if heat.percent else value:z.3g}"
        position = {"x": x + shade * width, "y": y + height + 10}
        yield TextBox(text=text, **position, anchor=anchor, color=DIM_COLOR)
