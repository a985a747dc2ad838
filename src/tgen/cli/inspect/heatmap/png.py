"""A heat map as a PNG, drawn by Pillow, which is an optional extra."""

import math
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING

from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.inspect.heatmap.layout import NUMBER, PAPER, TEXT, TITLE, Layout, TextBox, pixels
from tgen.cli.render.colormap import color_at
from tgen.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont, ImageFont

_PLAIN = {"⏎": "\\n", "⇥": "\\t", "␍": "\\r", "◌": ""}  # marks of `labels` that the font lacks
_PLACE = {"start": "lm", "middle": "mm", "end": "rm"}  # Pillow's words for them


def png(heat: HeatMap) -> bytes:
    """The picture as the bytes of a file."""
    try:
        from PIL import Image, ImageDraw
        from PIL.ImageFont import load_default

        fonts = {size: load_default(size) for size in (TITLE, TEXT, NUMBER)}
    except ImportError as error:
        raise UsageError("--png needs Pillow", "pip install 'tgen-lm[png]'") from error
    heat = _written(heat, fonts[TEXT])
    place = Layout(heat, lambda text, size: fonts[size].getlength(text))
    picture = Image.new("RGB", (place.width, place.height), PAPER)
    draw = ImageDraw.Draw(picture)

    matrix = pixels(heat).repeat(place.cell, 0).repeat(place.cell, 1)
    if place.space:
        matrix[place.cell - 1 :: place.cell] = 255
        matrix[:, place.cell - 1 :: place.cell] = 255
    picture.paste(Image.fromarray(matrix), (place.left, place.top))

    x, y, width, height = place.bar
    for i in range(width):
        draw.line((x + i, y, x + i, y + height - 1), color_at(i / (width - 1)))
    for words in place.words:
        font = fonts[words.size]
        if words.turned:
            _turned(picture, words, font)
        else:
            draw.text((words.x, words.y), words.text, words.ink, font, _PLACE[words.anchor])
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def _turned(picture: "Picture", words: TextBox, font: "FreeTypeFont | ImageFont") -> None:
    from PIL import Image, ImageDraw

    length, half = math.ceil(font.getlength(words.text)), words.size
    mask = Image.new("L", (length + 1, 2 * half))
    ImageDraw.Draw(mask).text((0, half), words.text, 255, font, "lm")
    part = {"start": 1.0, "middle": 0.5, "end": 0.0}[words.anchor]
    corner = (round(words.x) - half, round(words.y - part * length))
    picture.paste(words.ink, corner, mask.rotate(90, expand=True))


def _written(heat: HeatMap, font: "FreeTypeFont | ImageFont") -> HeatMap:
    """The same in characters that the font has; of others, their code points."""
    lacking = bytes(font.getmask("\uffff"))  # the box that stands for all of them

    def written(text: str) -> str:
        return "".join(
            _PLAIN.get(c, f"‹U+{ord(c):04X}›") if bytes(font.getmask(c)) == lacking else c
            for c in text
        )

    return replace(
        heat,
        title=written(heat.title),
        unit=written(heat.unit),
        rows=[written(label) for label in heat.rows],
        columns=[written(label) for label in heat.columns],
        row_name=written(heat.row_name),
        column_name=written(heat.column_name),
    )
