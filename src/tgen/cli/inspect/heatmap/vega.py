"""A heat map as a Vega-Lite specification, for Altair, notebooks and the Vega editor."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.inspect.heatmap.layout import SCALES, indexed_label, legend_values
from tgen.cli.render.colormap import RAMP, to_hex

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def vega(heat: HeatMap) -> dict[str, Any]:
    """Return the specification with its data, to be written as JSON; values are exact."""
    number_format = ".4~%" if heat.percent else ".4~g"
    tooltip = [
        {"field": "row", "title": heat.row_name, "type": "ordinal"},
        {"field": "row_label", "title": f"{heat.row_name} label", "type": "nominal"},
        {"field": "column", "title": heat.column_name, "type": "ordinal"},
        {"field": "column_label", "title": f"{heat.column_name} label", "type": "nominal"},
        {"field": "value", "format": number_format, "type": "quantitative"},
    ]
    step = min(max(768 // max(heat.values.shape), 2), 24)
    values = legend_values(heat)
    return {
        "$schema": _SCHEMA,
        "title": {"text": heat.title, "subtitle": heat.unit, "anchor": "start"},
        "config": {"font": "monospace", "view": {"stroke": None}},
        "background": "white",
        # Labels are data, never parts of an expression: none can run as one.
        "params": [
            {"name": "row_names", "value": _labels(heat.rows)},
            {"name": "column_names", "value": _labels(heat.columns)},
        ],
        # Named, as Altair writes it: with rows in "data" Altair takes minutes for 256 tokens.
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
                # Equals the other formats' colors where the lowest value is 0 or the scale linear.
                "scale": {
                    "type": heat.scale,
                    "domain": [values[0], values[-1]],
                    "range": [to_hex(color) for color in RAMP],
                    "interpolate": "rgb",
                    "clamp": True,
                },
                "legend": {"title": SCALES[heat.scale], "format": number_format, "values": values},
            },
            "tooltip": tooltip,
        },
    }


def _cells(heat: HeatMap) -> list[dict[str, Any]]:
    # 9 digits identify any float32, and are half as long as those of the same float64.
    return [
        {
            "row": row,
            "column": column,
            "row_label": heat.rows[row],
            "column_label": heat.columns[column],
            "value": float(f"{heat.values[row, column]:.9g}"),
        }
        for row, column in np.argwhere(heat.visible()).tolist()
    ]


def _labels(labels: Sequence[str]) -> list[str]:
    return [indexed_label(i, labels) for i in range(len(labels))]


def _axis(field: str, name: str, n: int) -> dict[str, Any]:
    label = {"labelExpr": f"{field}_names[datum.value]", "labelOverlap": True, "labelLimit": 180}
    return {
        "field": field,
        "type": "ordinal",
        "scale": {"domain": list(range(n))},
        "axis": {"title": name, **label},
    }
