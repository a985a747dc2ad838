"""The color map of all heat maps: viridis, in which lighter means more."""

from functools import cache

from rich.color import Color, ColorSystem, ColorType
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

MAX_BITS = 12.0  # surprisal with the lightest color: a probability of 1/4,096
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
# The same hues in the palette of terminals with 256 colors, from dark to light. The colors
# that rich considers nearest do not become steadily lighter.
_RAMP_256 = (53, 54, 24, 30, 36, 72, 77, 113, 149, 184, 220)


def color_at(shade: float) -> RGB:
    """Return the color of a shade from 0 to 1, linearly interpolated."""
    position = min(max(shade, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(position), len(RAMP) - 2)
    red, green, blue = (
        round(a + (b - a) * (position - low)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True)
    )
    return red, green, blue


def is_light(color: RGB) -> bool:
    """Return whether black text contrasts better than white."""
    return luminance(color) > 0.179


def luminance(color: RGB) -> float:
    """Return WCAG's relative luminance, from 0 to 1."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


class _RampColor(Color):
    """A color of the ramp, which becomes one of `_RAMP_256` on terminals with 256 colors."""

    def downgrade(self, system: ColorSystem) -> Color:  # type: ignore[override]
        """Return the color for a terminal's palette."""
        if system == ColorSystem.EIGHT_BIT and self.triplet is not None:
            return Color(self.name, ColorType.EIGHT_BIT, number=_nearest_256(self.triplet))
        return super().downgrade(system)


@cache
def _nearest_256(color: RGB) -> int:
    """Return the number in `_RAMP_256` that is as light as the color."""
    return min(_RAMP_256, key=lambda number: abs(_luminance_256(number) - luminance(color)))


def _luminance_256(number: int) -> float:
    color = Color("", ColorType.EIGHT_BIT, number=number)
    return luminance(color.get_truecolor(DEFAULT_TERMINAL_THEME))


def terminal_color(shade: float) -> Color:
    """Return the color of a shade from 0 to 1 in a terminal."""
    red, green, blue = color_at(shade)
    return _RampColor(*Color.from_rgb(red, green, blue))


def highlight(shade: float) -> Style:
    """Return the style of text on a shade: exact black or white, since a terminal's named colors
    may be grays."""
    foreground = (0, 0, 0) if is_light(color_at(shade)) else (255, 255, 255)
    return Style(color=Color.from_rgb(*foreground), bgcolor=terminal_color(shade))


def to_hex(color: RGB) -> str:
    """Return a color as #rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*color)
