"""Reports with a matrix -> heat maps."""

from collections.abc import Sequence

import numpy as np

from tgen.cli.inspect.heatmap.heatmap import HeatMap, Scale
from tgen.cli.render.token_labels import label
from tgen.reports import AttentionReport, PositionsReport, RolloutReport


def attention_map(report: AttentionReport, tokens: Sequence[bytes], *, scale: Scale) -> HeatMap:
    """A head's weights, query by key."""
    which = "mean of its heads" if report.head is None else f"head {report.head}"
    title = f"layer {report.layer}, {which}"
    if report.kv_head is not None and report.kv_head != report.head:
        title += f" (keys of head {report.kv_head})"
    if report.measure == "value":
        title += ": what each key adds"
    adds = "what each key adds, |weight x value W_O|, in percent of all that the row's keys add"
    return HeatMap(
        title=title + (f" · {report.why}" if report.why else ""),
        values=report.weights,
        rows=(labels := [label(token) for token in tokens]),
        columns=labels,
        scale=scale,
        unit=adds if report.measure == "value" else HeatMap.unit,
    )


def rollout_map(report: RolloutReport, tokens: Sequence[bytes], *, scale: Scale) -> HeatMap:
    """Which tokens could have fed each position."""
    return HeatMap(
        title=f"rollout up to layer {report.layer}: which tokens could have fed each position",
        values=report.weights,
        rows=(labels := [label(token) for token in tokens]),
        columns=labels,
        row_name="position",
        column_name="token",
        scale=scale,
        unit="what each position holds, in percent by token: half comes by its own path at each "
        "layer",
    )


def positions_map(report: PositionsReport) -> HeatMap:
    """An encoding; learned vectors from minus to plus their largest number."""
    largest = float(np.abs(report.values).max()) if report.kind == "learned" else 1.0
    return HeatMap(
        title=report.title,
        values=report.values,
        rows=report.rows,
        columns=report.columns,
        row_name=report.row_name,
        column_name=report.column_name,
        low=-largest,
        high=largest,
        scale="linear",
        causal=False,
        percent=False,
        unit="",
    )
