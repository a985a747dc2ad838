"""One ramp for all pictures, in which lighter is always more."""

from rich.color import Color
from rich.style import Style

# From dark violet over green to yellow: even steps of lightness, so that it reads in grey too.
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
    """The ramp's red, green and blue at a shade from 0 to 1."""
    place = min(max(shade, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - low)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True)
    )
    return red, green, blue


def is_light(of: RGB) -> bool:
    """Whether black is read better on it than white: by WCAG's relative luminance."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in of]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179


def highlight(shade: float) -> Style:
    """Text on the ramp's colour; not in a terminal's own black and white, which may be greys."""
    back = color_at(shade)
    front = (0, 0, 0) if is_light(back) else (255, 255, 255)
    return Style(color=Color.from_rgb(*front), bgcolor=Color.from_rgb(*back))


def to_hex(of: RGB) -> str:
    """As in HTML: #rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*of)
