"""A heat map as a Vega-Lite specification: it opens in Altair, notebooks and Vega's editor."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.inspect.heatmap.layout import SCALES, build_layout, named, ticks
from tgen.cli.render.colormap import RAMP, to_hex

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def vega(heat: HeatMap) -> dict[str, Any]:
    """The specification with its data, to be written as JSON; values are exact."""
    form = ".4~%" if heat.percent else ".4~g"
    tips = [
        {"field": "row", "title": heat.row_name},
        {"field": "row_label", "title": f"{heat.row_name} label"},
        {"field": "column", "title": heat.column_name},
        {"field": "column_label", "title": f"{heat.column_name} label"},
        {"field": "value", "format": form},
    ]
    kinds = ("ordinal", "nominal", "ordinal", "nominal", "quantitative")
    step = min(max(768 // max(heat.values.shape), 2), 24)
    return {
        "$schema": _SCHEMA,
        "title": {"text": heat.title, "subtitle": heat.unit, "anchor": "start"},
        "config": {"font": "monospace", "view": {"stroke": None}},
        "background": "white",
        # Labels are data, not parts of an expression: none can be read as one.
        "params": [
            {"name": "row_names", "value": _names(heat.rows)},
            {"name": "column_names", "value": _names(heat.columns)},
        ],
        # Under a name, as Altair writes it: with rows in "data" it takes minutes for 256 tokens.
        "data": {"name": "cells"},
        "datasets": {"cells": _cells(heat)},
        "width": {"step": step},
        "height": {"step": step},
        "mark": "rect",
        "encoding": {
            "x": _axis("column", heat.column_name, len(heat.columns)),
            "y": _axis("row", heat.row_name, len(heat.rows)),
            "color": {
                "field": "value",
                "type": "quantitative",
                "scale": _scale(heat),
                "legend": {"title": SCALES[heat.scale], "format": form, "values": ticks(heat)},
            },
            "tooltip": [tip | {"type": kind} for tip, kind in zip(tips, kinds, strict=True)],
        },
    }


def _cells(heat: HeatMap) -> list[dict[str, Any]]:
    # 9 digits tell all float32 apart, and are half as long as those of the same float64.
    return [
        {
            "row": row,
            "column": column,
            "row_label": heat.rows[row],
            "column_label": heat.columns[column],
            "value": float(f"{heat.values[row, column]:.9g}"),
        }
        for row, column in np.argwhere(build_layout(heat)).tolist()
    ]


def _names(labels: Sequence[str]) -> list[str]:
    return [named(i, labels) for i in range(len(labels))]


def _axis(field: str, name: str, n: int) -> dict[str, Any]:
    label = {"labelExpr": f"{field}_names[datum.value]", "labelOverlap": True, "labelLimit": 180}
    return {
        "field": field,
        "type": "ordinal",
        "scale": {"domain": list(range(n))},
        "axis": {"title": name, **label},
    }


def _scale(heat: HeatMap) -> dict[str, Any]:
    """The same colours as everywhere, exactly so where the lowest value is 0 or all is linear."""
    low, *_, high = ticks(heat)
    return {
        "type": heat.scale,
        "domain": [low, high],
        "range": [to_hex(of) for of in RAMP],
        "interpolate": "rgb",
        "clamp": True,
    }
