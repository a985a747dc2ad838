"""A heat map, independent of its output format: how reports become one, and its layout in pixels.

The layout has the positions of cells, legend and texts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tgen.drawing import Scale
from tgen.drawing.colormap import color_at, is_light
from tgen.drawing.terminal_text import cut, label
from tgen.reports.inspection import AttentionReport, PatchReport, PositionsReport, RolloutReport
from tgen.reports.number_format import count

AUTO_SELECTED = "auto-selected: most focused head"
LOG_MIN = 1e-4  # smallest share that the log scale distinguishes from 0
TITLE_SIZE, TEXT_SIZE, NUMBER_SIZE = 15, 12, 11  # font sizes
TEXT_COLOR, DIM_COLOR, BACKGROUND = "#222222", "#707070", "#ffffff"
SCALES = {"sqrt": "square-root scale", "linear": "linear scale", "log": "log scale"}
_MARGIN, _GAP, _LINE, _BAR = 20, 6, 16, (200, 10)
_TICKS = {"sqrt": (0, 0.05, 0.25, 0.5, 1), "log": (1e-4, 1e-3, 0.01, 0.1, 1)}
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeatMap:
    """A matrix with labels for its rows and columns."""

    title: str  # one line
    values: NDArray[np.float32]  # (rows, columns)
    rows: Sequence[str]  # printable labels
    columns: Sequence[str]
    row_name: str = "query"
    column_name: str = "key"
    low: float = 0.0  # the darkest color
    high: float = 1.0  # the lightest color
    scale: Scale = "sqrt"
    causal: bool = True  # whether cells right of the diagonal are masked
    window: int | None = None  # visible cells of a causal row at most, those before are masked
    percent: bool = True  # whether values are shares, written in percent
    unit: str = "attention weights of each query (row) over the keys (columns), percent"

    def visible(self) -> NDArray[np.bool_]:
        """Return which cells are not masked, (rows, columns)."""
        visible = np.ones(self.values.shape, np.bool_)
        if self.causal:
            visible = np.tril(visible)
        return visible if self.window is None else np.triu(visible, 1 - self.window)

    def shades(self, values: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return values, by default all, as shades from 0 to 1 for `colormap.color_at`."""
        values = self.values if values is None else values
        shades = np.clip((values - self.low) / ((self.high - self.low) or 1), 0, 1)
        if self.scale == "sqrt":
            shades = np.sqrt(shades)
        elif self.scale == "log":
            shades = 1 - np.log(np.maximum(shades, LOG_MIN)) / np.log(LOG_MIN)
        return np.nan_to_num(np.asarray(shades, np.float32))  # a self-check reports NaN


def attention_map(report: AttentionReport, tokens: Sequence[bytes], *, scale: Scale) -> HeatMap:
    """Return the heat map of one head's attention weights."""
    head = "mean of all heads" if report.head is None else f"head {report.head}"
    title = f"layer {report.layer}, {head}"
    if report.kv_head is not None and report.kv_head != report.head:
        title += f" (key/value head {report.kv_head})"
    if report.window is not None:
        title += f", sliding window of {count(report.window, 'token')}"
    unit = HeatMap.unit
    if report.measure == "value":
        title += ", value-weighted"
        unit = "each key's contribution, |attention weight x value W_O|, percent of the row"
    if report.selection:
        title += f" · {report.selection}"
    labels = [label(token) for token in tokens]
    return HeatMap(
        title=title,
        values=report.weights,
        rows=labels,
        columns=labels,
        scale=scale,
        window=report.window,
        unit=unit,
    )


def rollout_map(report: RolloutReport, tokens: Sequence[bytes], *, scale: Scale) -> HeatMap:
    """Return the heat map of attention rollout up to one layer."""
    labels = [label(token) for token in tokens]
    return HeatMap(
        title=f"attention rollout up to layer {report.layer}",
        values=report.weights,
        rows=labels,
        columns=labels,
        row_name="position",
        column_name="token",
        scale=scale,
        unit="share of each token (column) in each position (row), percent; each layer keeps half "
        "by its residual connection",
    )


def patch_map(report: PatchReport, tokens: Sequence[bytes]) -> HeatMap:
    """Return the heat map of activation patching; a column of other tokens names both."""
    names = [label(report.target_text), label(report.contrast_text)]
    columns = [str(head) for head in range(report.scores.shape[1])]
    if report.part != "heads":
        pairs = zip(map(label, tokens), map(label, report.other_tokens), strict=False)
        columns = [one if one == other else f"{one}|{other}" for one, other in pairs]
    return HeatMap(
        title=f"{report.part}: share of the logit difference of {names[0]} and {names[1]} that is "
        f"restored; {report.difference:+.2f} after the prompt, {report.other_difference:+.2f} "
        "after the other one",
        values=report.scores,
        rows=[str(layer) for layer in range(len(report.scores))],
        columns=columns,
        row_name="layer",
        column_name="head" if report.part == "heads" else "position",
        low=min(0.0, float(report.scores.min())),
        high=max(1.0, float(report.scores.max())),
        scale="linear",
        causal=False,
        unit="share that the prompt's activation restores in the other prompt, percent",
    )


def positions_map(report: PositionsReport) -> HeatMap:
    """Return the heat map of a position encoding; learned vectors set their own range.

    That of rotary positions has a row per pair of dimensions and a column per distance.
    """
    largest = float(np.abs(report.values).max()) if report.kind == "learned" else 1.0
    values, rows, columns = report.values, report.rows, report.columns
    row_name, column_name = report.row_name, report.column_name
    if report.kind in ("rotary", "rotary_local"):
        values, rows, columns = values.T, columns, rows
        row_name, column_name = column_name, row_name
    return HeatMap(
        title=report.title,
        values=values,
        rows=rows,
        columns=columns,
        row_name=row_name,
        column_name=column_name,
        low=-largest,
        high=largest,
        scale="linear",
        causal=False,
        percent=False,
        unit="",
    )


@dataclass(frozen=True, kw_only=True)
class TextBox:
    """A text whose start, middle or end is at (x, y), vertically centered."""

    text: str
    x: float
    y: float
    anchor: Anchor = "start"
    size: int = TEXT_SIZE
    color: str = TEXT_COLOR
    rotated: bool = False  # reads upward


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


def legend_values(heat: HeatMap) -> list[float]:
    """Return the values labeled in the legend, the lowest and the highest among them."""
    shares = _TICKS.get(heat.scale, (0, 0.25, 0.5, 0.75, 1))
    return [heat.low + share * (heat.high - heat.low) for share in shares]


def indexed_label(index: int, labels: Sequence[str]) -> str:
    """Return an index with its label, or the index alone where they are equal."""
    return f"{index} {labels[index]}" if labels[index] != str(index) else labels[index]


def cell_colors(heat: HeatMap) -> NDArray[np.uint8]:
    """Return the RGB color of each cell (rows, columns, 3), white where masked."""
    image = np.full((*heat.values.shape, 3), 255, np.uint8)
    visible = heat.visible()
    image[visible] = [color_at(shade) for shade in heat.shades()[visible].tolist()]
    return image


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
