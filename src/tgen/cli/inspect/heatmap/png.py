"""A heat map as PNG, drawn by Pillow (an optional extra)."""

import math
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING

from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.inspect.heatmap.layout import (
    BACKGROUND,
    NUMBER_SIZE,
    TEXT_SIZE,
    TITLE_SIZE,
    Layout,
    TextBox,
    cell_colors,
)
from tgen.cli.render.colormap import color_at
from tgen.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont, ImageFont

_REPLACEMENTS = {"⏎": "\\n", "⇥": "\\t", "␍": "\\r", "◌": ""}  # marks that the font lacks
_PILLOW_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def png(heat: HeatMap) -> bytes:
    """Return the picture as the bytes of a PNG file; raises UsageError without Pillow."""
    try:
        from PIL import Image, ImageDraw
        from PIL.ImageFont import load_default

        fonts = {size: load_default(size) for size in (TITLE_SIZE, TEXT_SIZE, NUMBER_SIZE)}
    except ImportError as error:
        raise UsageError("--png needs Pillow", "pip install 'tgen-lm[png]'") from error
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
    for box in layout.texts:
        font = fonts[box.size]
        if box.rotated:
            _draw_rotated(picture, box, font)
        else:
            draw.text((box.x, box.y), box.text, box.color, font, _PILLOW_ANCHORS[box.anchor])
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def _draw_rotated(picture: "Picture", box: TextBox, font: "FreeTypeFont | ImageFont") -> None:
    from PIL import Image, ImageDraw

    length, half_height = math.ceil(font.getlength(box.text)), box.size
    mask = Image.new("L", (length + 1, 2 * half_height))
    ImageDraw.Draw(mask).text((0, half_height), box.text, 255, font, "lm")
    above = {"start": 1.0, "middle": 0.5, "end": 0.0}[box.anchor]
    corner = (round(box.x) - half_height, round(box.y - above * length))
    picture.paste(box.color, corner, mask.rotate(90, expand=True))


def _with_font_characters(heat: HeatMap, font: "FreeTypeFont | ImageFont") -> HeatMap:
    """Replace characters that the font lacks with their code points."""
    missing = bytes(font.getmask("\uffff"))  # the glyph of all missing characters

    def replaced(text: str) -> str:
        return "".join(
            _REPLACEMENTS.get(c, f"‹U+{ord(c):04X}›") if bytes(font.getmask(c)) == missing else c
            for c in text
        )

    return replace(
        heat,
        title=replaced(heat.title),
        unit=replaced(heat.unit),
        rows=[replaced(label) for label in heat.rows],
        columns=[replaced(label) for label in heat.columns],
        row_name=replaced(heat.row_name),
        column_name=replaced(heat.column_name),
    )
