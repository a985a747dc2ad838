"""A heat map as a file: a self-contained SVG, a PNG, or a Vega-Lite specification.

Pillow, an optional extra, draws the PNG. Altair, notebooks and the Vega editor show Vega-Lite.
"""

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from tgen.drawing.colormap import RAMP, color_at, to_hex
from tgen.drawing.heat_map import SCALES, HeatMap, cell_colors, indexed_label, legend_values
from tgen.drawing.picture_layout import Layout
from tgen.drawing.picture_text import (
    BACKGROUND,
    TEXT_SIZE,
    finish_png,
    font_text,
    load_fonts,
    svg_text,
)

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

_MAX_SHAPES = 48  # rows or columns up to which each cell is its own shape
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def svg(heat: HeatMap) -> str:
    """Return the SVG; up to 48 x 48, every cell is a shape whose tooltip has its value."""
    layout = Layout(heat, lambda text, size: 0.6 * size * cell_len(text))
    x, y, width, height = layout.bar
    stops = "".join(
        f'<stop offset="{i / (len(RAMP) - 1):.4g}" stop-color="{to_hex(color)}"/>'
        for i, color in enumerate(RAMP)
    )
    size = f'width="{layout.width}" height="{layout.height}"'
    is_small = max(heat.values.shape) <= _MAX_SHAPES
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
            f' viewBox="0 0 {layout.width} {layout.height}" style="font-family: monospace">',
            f"<title>{escape(heat.title)}</title>",
            f'<defs><linearGradient id="ramp">{stops}</linearGradient></defs>',
            f'<rect {size} fill="{BACKGROUND}"/>',
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="url(#ramp)"/>',
            *(_shapes(heat, layout) if is_small else [_image(heat, layout)]),
            *(svg_text(box) for box in layout.texts if box.text),
            "</svg>\n",
        ]
    )


def _shapes(heat: HeatMap, layout: Layout) -> Iterator[str]:
    shades, side = heat.shades(), layout.cell - layout.gap
    for row, column in np.argwhere(heat.visible()).tolist():
        value = float(heat.values[row, column])
        fill = to_hex(color_at(float(shades[row, column])))
        tooltip = "\n".join(
            (
                f"{heat.row_name} {indexed_label(row, heat.rows)}",
                f"{heat.column_name} {indexed_label(column, heat.columns)}",
                f"{100 * value:.3g}%" if heat.percent else f"{value:.4g}",
            )
        )
        x, y = layout.left + column * layout.cell, layout.top + row * layout.cell
        yield (
            f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="{fill}">'
            f"<title>{escape(tooltip)}</title></rect>"
        )


def _image(heat: HeatMap, layout: Layout) -> str:
    n_rows, n_columns = heat.values.shape
    data = base64.b64encode(_encode_png(cell_colors(heat))).decode()
    return (
        f'<image x="{layout.left}" y="{layout.top}" width="{n_columns * layout.cell}"'
        f' height="{n_rows * layout.cell}" preserveAspectRatio="none"'
        f' style="image-rendering: pixelated" href="data:image/png;base64,{data}"/>'
    )


def _encode_png(image: NDArray[np.uint8]) -> bytes:
    """Return a PNG with one pixel per cell, in which white is transparent."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        checksum = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)

    height, width, _ = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in image)  # 0: no filter
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"tRNS", struct.pack(">HHH", 255, 255, 255)),
            chunk(b"IDAT", zlib.compress(lines, 9)),
            chunk(b"IEND", b""),
        ]
    )


def png(heat: HeatMap) -> bytes:
    """Return the picture as the bytes of a PNG file; raises UsageError without Pillow."""
    fonts = load_fonts()
    from PIL import Image, ImageDraw

    heat = _with_font_characters(heat, fonts[TEXT_SIZE])
    layout = Layout(heat, lambda text, size: fonts[size].getlength(text))
    picture = Image.new("RGB", (layout.width, layout.height), BACKGROUND)
    draw = ImageDraw.Draw(picture)

    matrix = cell_colors(heat).repeat(layout.cell, 0).repeat(layout.cell, 1)
    if layout.gap:
        matrix[layout.cell - 1 :: layout.cell] = 255
        matrix[:, layout.cell - 1 :: layout.cell] = 255
    picture.paste(Image.fromarray(matrix), (layout.left, layout.top))

    x, y, width, height = layout.bar
    for i in range(width):
        draw.line((x + i, y, x + i, y + height - 1), color_at(i / (width - 1)))
    return finish_png(picture, layout.texts, fonts)


def _with_font_characters(heat: HeatMap, font: "FreeTypeFont | ImageFont") -> HeatMap:
    names, labels = ("title", "unit", "row_name", "column_name"), ("rows", "columns")
    texts: dict[str, Any] = {name: font_text(getattr(heat, name), font) for name in names}
    texts |= {name: [font_text(one, font) for one in getattr(heat, name)] for name in labels}
    return replace(heat, **texts)


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
