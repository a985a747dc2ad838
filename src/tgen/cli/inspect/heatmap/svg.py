"""A heat map as a self-contained SVG."""

import base64
import struct
import zlib
from collections.abc import Iterator
from html import escape

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.inspect.heatmap.layout import (
    BACKGROUND,
    Layout,
    TextBox,
    cell_colors,
    indexed_label,
)
from tgen.cli.render.colormap import RAMP, color_at, to_hex

_MAX_SHAPES = 48  # rows or columns up to which each cell is its own shape


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
            *(_text(box) for box in layout.texts if box.text),
            "</svg>\n",
        ]
    )


def _text(box: TextBox) -> str:
    position = f'x="{box.x:g}" y="{box.y:g}" dy=".35em"'
    rotation = f' transform="rotate(-90 {box.x:g} {box.y:g})"' if box.rotated else ""
    style = f'text-anchor="{box.anchor}" font-size="{box.size}" fill="{box.color}"'
    return f"<text {position} {style}{rotation}>{escape(box.text)}</text>"


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
