"""A heat map, independent of its output format, and the reports that become one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgen.drawing import Scale
from tgen.drawing.colormap import color_at
from tgen.drawing.terminal_text import label
from tgen.reports.inspection import AttentionReport, PatchReport, PositionsReport, RolloutReport
from tgen.reports.number_format import count

AUTO_SELECTED = "auto-selected: most focused head"
LOG_MIN = 1e-4  # smallest share that the log scale distinguishes from 0
SCALES = {"sqrt": "square-root scale", "linear": "linear scale", "log": "log scale"}
_TICKS = {"sqrt": (0, 0.05, 0.25, 0.5, 1), "log": (1e-4, 1e-3, 0.01, 0.1, 1)}


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
