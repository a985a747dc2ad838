"""Text in pictures: fonts, sizes and colors, written into an SVG or drawn into a PNG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Literal

from tgen.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont, ImageFont

    Fonts = dict[int, FreeTypeFont | ImageFont]  # by size

TITLE_SIZE, TEXT_SIZE, NUMBER_SIZE = 15, 12, 11  # font sizes
TEXT_COLOR, DIM_COLOR, BACKGROUND = "#222222", "#707070", "#ffffff"
_REPLACEMENTS = {"⏎": "\\n", "⇥": "\\t", "␍": "\\r", "◌": ""}  # marks that the font lacks
_PILLOW_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}
Anchor = Literal["start", "middle", "end"]


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


def svg_text(box: TextBox) -> str:
    """Return a text as an element of an SVG."""
    position = f'x="{box.x:g}" y="{box.y:g}" dy=".35em"'
    rotation = f' transform="rotate(-90 {box.x:g} {box.y:g})"' if box.rotated else ""
    style = f'text-anchor="{box.anchor}" font-size="{box.size}" fill="{box.color}"'
    return f"<text {position} {style}{rotation}>{escape(box.text)}</text>"


def finish_png(picture: "Picture", texts: Sequence[TextBox], fonts: "Fonts") -> bytes:
    """Draw the texts on a picture; return it as the bytes of a PNG file."""
    from PIL import ImageDraw

    draw = ImageDraw.Draw(picture)
    for box in texts:
        if box.rotated:
            _draw_rotated(picture, box, fonts[box.size])
        else:
            anchor = _PILLOW_ANCHORS[box.anchor]
            draw.text((box.x, box.y), box.text, box.color, fonts[box.size], anchor)
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def load_fonts() -> "Fonts":
    """Return the font by size; raises UsageError without Pillow."""
    try:
        from PIL import ImageFont

        return {size: ImageFont.load_default(size) for size in (TITLE_SIZE, TEXT_SIZE, NUMBER_SIZE)}
    except ImportError as error:
        raise UsageError("--png needs Pillow", "pip install 'tgen-lm[png]'") from error


def _draw_rotated(picture: "Picture", box: TextBox, font: "FreeTypeFont | ImageFont") -> None:
    from PIL import Image, ImageDraw

    length, half_height = math.ceil(font.getlength(box.text)), box.size
    mask = Image.new("L", (length + 1, 2 * half_height))
    ImageDraw.Draw(mask).text((0, half_height), box.text, 255, font, "lm")
    above = {"start": 1.0, "middle": 0.5, "end": 0.0}[box.anchor]
    corner = (round(box.x) - half_height, round(box.y - above * length))
    picture.paste(box.color, corner, mask.rotate(90, expand=True))


def font_text(text: str, font: "FreeTypeFont | ImageFont") -> str:
    """Replace characters that the font lacks with their code points."""
    missing = bytes(font.getmask("\uffff"))  # the glyph of all missing characters
    return "".join(
        _REPLACEMENTS.get(c, f"‹U+{ord(c):04X}›") if bytes(font.getmask(c)) == missing else c
        for c in text
    )
