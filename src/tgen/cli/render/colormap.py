"""The color map of all heat maps: viridis, in which lighter means more."""

from rich.color import Color
from rich.style import Style

# Viridis at eight points; its lightness rises evenly, so that it also works in grayscale.
RAMP = [
    (68, 1, 84),
    (70, 50, 127),
    (54, 92, 141),
    (39, 127, 142),
    (31, 161, 135),
    (74, 194, 109),
    (159, 218, 58),
    (253, 231, 37),
]
RGB = tuple[int, int, int]


def color_at(shade: float) -> RGB:
    """Return the color of a shade from 0 to 1, linearly interpolated."""
    position = min(max(shade, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(position), len(RAMP) - 2)
    red, green, blue = (
        round(a + (b - a) * (position - low)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True)
    )
    return red, green, blue


def is_light(color: RGB) -> bool:
    """Return whether black text contrasts better than white, by WCAG's relative luminance."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179


def highlight(shade: float) -> Style:
    """Return the style of text on a shade: exact black or white, since a terminal's named colors
    may be grays."""
    background = color_at(shade)
    foreground = (0, 0, 0) if is_light(background) else (255, 255, 255)
    return Style(color=Color.from_rgb(*foreground), bgcolor=Color.from_rgb(*background))


def to_hex(color: RGB) -> str:
    """Return a color as #rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*color)
