"""A heat map as an SVG that needs nothing else."""

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
    PAPER,
    Layout,
    TextBox,
    build_layout,
    named,
    pixels,
)
from tgen.cli.render.colormap import RAMP, color_at, to_hex

_EDITABLE = 48  # rows or columns up to which each cell is a shape


def svg(heat: HeatMap) -> str:
    """The picture as the text of a file; up to 48 x 48, every cell is a shape with its value."""
    place = Layout(heat, lambda text, size: 0.6 * size * cell_len(text))
    x, y, width, height = place.bar
    stops = "".join(
        f'<stop offset="{i / (len(RAMP) - 1):.4g}" stop-color="{to_hex(of)}"/>'
        for i, of in enumerate(RAMP)
    )
    size = f'width="{place.width}" height="{place.height}"'
    few = max(heat.values.shape) <= _EDITABLE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
            f' viewBox="0 0 {place.width} {place.height}" style="font-family: monospace">',
            f"<title>{escape(heat.title)}</title>",
            f'<defs><linearGradient id="ramp">{stops}</linearGradient></defs>',
            f'<rect {size} fill="{PAPER}"/>',
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="url(#ramp)"/>',
            *(_shapes(heat, place) if few else [_image(heat, place)]),
            *(_text(words) for words in place.words if words.text),
            "</svg>\n",
        ]
    )


def _text(words: TextBox) -> str:
    at = f'x="{words.x:g}" y="{words.y:g}" dy=".35em"'
    turn = f' transform="rotate(-90 {words.x:g} {words.y:g})"' if words.turned else ""
    look = f'text-anchor="{words.anchor}" font-size="{words.size}" fill="{words.ink}"'
    return f"<text {at} {look}{turn}>{escape(words.text)}</text>"


def _shapes(heat: HeatMap, place: Layout) -> Iterator[str]:
    shades, side = heat.shades(), place.cell - place.space
    for row, column in np.argwhere(build_layout(heat)).tolist():
        value = float(heat.values[row, column])
        fill = to_hex(color_at(float(shades[row, column])))
        number = f"{100 * value:.3g} %" if heat.percent else f"{value:.4g}"
        names = (
            f"{heat.row_name} {named(row, heat.rows)}",
            f"{heat.column_name} {named(column, heat.columns)}",
        )
        tip = "\n".join((*names, number))
        x, y = place.left + column * place.cell, place.top + row * place.cell
        yield (
            f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="{fill}">'
            f"<title>{escape(tip)}</title></rect>"
        )


def _image(heat: HeatMap, place: Layout) -> str:
    n_rows, n_columns = heat.values.shape
    data = base64.b64encode(_png(pixels(heat))).decode()
    return (
        f'<image x="{place.left}" y="{place.top}" width="{n_columns * place.cell}"'
        f' height="{n_rows * place.cell}" preserveAspectRatio="none"'
        f' style="image-rendering: pixelated" href="data:image/png;base64,{data}"/>'
    )


def _png(image: NDArray[np.uint8]) -> bytes:
    """A small PNG with a pixel for each cell, see-through where it is white."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

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
