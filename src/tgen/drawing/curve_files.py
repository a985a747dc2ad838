"""Curves as a file: a self-contained SVG, or a PNG.

The label of a curve is at the right, beside its end; a line leads to it. Pillow draws the PNG.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING

from tgen.drawing.curve_plot import CurvePlot, tick_labels
from tgen.drawing.picture_text import (
    BACKGROUND,
    DIM_COLOR,
    TEXT_SIZE,
    TITLE_SIZE,
    TextBox,
    finish_png,
    font_text,
    load_fonts,
    svg_text,
)
from tgen.drawing.terminal_text import cut, one_line

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# Okabe & Ito 2008, which the color-blind can tell apart, without yellow.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#444444")
_GRID = "#e4e4e4"
_LEFT, _TOP, _BELOW, _GAP = 76, 56, 52, 34  # pixels around the plot; the gap is that of the labels
_WIDTH, _HEIGHT = 640, 400  # of the plot
_LINE = 15  # between labels
_MAX_LABEL = 60  # characters
_FINER = 3  # pixels of a PNG are means of so many by so many
_OPACITY = 0.16  # of intervals
Point = tuple[float, float]


class CurveLayout:
    """Positions in pixels; those of curves, bands and grid count from the plot's corner."""

    def __init__(self, plot: CurvePlot, text_width: Callable[[str, int], float]) -> None:
        """Lay out a plot; `text_width` measures a text in a font size."""
        self.plot_width, self.plot_height = _WIDTH, max(_HEIGHT, _LINE * len(plot.curves))
        x, y = plot.axes(_WIDTH, self.plot_height)

        def position(a: float, b: float) -> Point:
            across = (a - x.low) / ((x.high - x.low) or 1)
            return across * _WIDTH, (y.high - b) / (y.high - y.low) * self.plot_height

        self.lines = [list(map(position, curve.x, curve.y)) for curve in plot.curves]
        self.bands = [
            [*map(position, curve.x, curve.high), *map(position, curve.x[::-1], curve.low[::-1])]
            for curve in plot.curves
        ]
        self.colors = [COLORS[curve.color % len(COLORS)] for curve in plot.curves]
        labels = [
            f"{letter} {cut(one_line(curve.label), _MAX_LABEL)}".strip()
            for curve, letter in zip(plot.curves, plot.names(), strict=True)
        ]
        heights = _spread([line[-1][1] for line in self.lines], self.plot_height)
        right = _LEFT + _WIDTH + _GAP
        self.leaders = [
            [(_LEFT + line[-1][0], _TOP + line[-1][1]), (_LEFT + _WIDTH + 8, _TOP + line[-1][1]),
             (right - 8, _TOP + height), (right - 3, _TOP + height)]
            for line, height in zip(self.lines, heights, strict=True)
        ]  # fmt: skip
        self.grid: list[list[Point]] = []
        bottom = _TOP + self.plot_height
        self.texts = [
            TextBox(text=plot.title, x=20, y=24, size=TITLE_SIZE),
            TextBox(text=plot.y_name, x=20, y=_TOP + self.plot_height / 2, anchor="middle",
                    rotated=True),
            TextBox(text=plot.x_name, x=_LEFT + _WIDTH / 2, y=bottom + 38, anchor="middle"),
            *(
                TextBox(text=label, x=right, y=_TOP + height, color=color)
                for label, height, color in zip(labels, heights, self.colors, strict=True)
            ),
        ]  # fmt: skip
        dim = partial(TextBox, color=DIM_COLOR)
        for tick, label in tick_labels(y, 7).items():
            height = position(0, tick)[1]
            self.grid.append([(0, height), (_WIDTH, height)])
            self.texts.append(dim(text=label, x=_LEFT - 8, y=_TOP + height, anchor="end"))
        for tick, label in tick_labels(x, 7).items():
            across = position(tick, 0)[0]
            self.grid.append([(across, 0), (across, self.plot_height)])
            self.texts.append(dim(text=label, x=_LEFT + across, y=bottom + 16, anchor="middle"))
        longest = max(text_width(label, TEXT_SIZE) for label in labels)
        title_end = 20 + text_width(plot.title, TITLE_SIZE)
        self.width = round(max(right + longest, title_end)) + 20
        self.height = bottom + _BELOW


def _spread(heights: Sequence[float], limit: float) -> list[float]:
    """Return heights near these, up to `limit`, with room for a line of text each."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    wanted = [heights[i] for i in order]
    middle = [(a + b) / 2 for a, b in zip(_push_down(wanted), _push_up(wanted), strict=True)]
    inside = _push_down([max(middle[0], 0.0), *middle[1:]])
    inside = _push_up([*inside[:-1], min(inside[-1], limit)])
    return [height for _, height in sorted(zip(order, inside, strict=True))]


def _push_down(heights: Sequence[float]) -> list[float]:
    return list(accumulate(heights, lambda above, one: max(one, above + _LINE)))


def _push_up(heights: Sequence[float]) -> list[float]:
    return list(accumulate(heights[::-1], lambda below, one: min(one, below - _LINE)))[::-1]


def _lighter(color: str) -> str:
    """Return the mean of a color and white."""
    return "#" + bytes((one + 255) // 2 for one in bytes.fromhex(color[1:])).hex()


def svg(plot: CurvePlot) -> str:
    """Return the SVG; a curve has its label as tooltip."""
    layout = CurveLayout(plot, lambda text, size: 0.6 * size * len(text))
    size = f'width="{layout.width}" height="{layout.height}"'
    inside = f'x="{_LEFT}" y="{_TOP}" width="{layout.plot_width}" height="{layout.plot_height}"'
    curves = zip(plot.curves, layout.lines, layout.bands, layout.colors, strict=True)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
            f' viewBox="0 0 {layout.width} {layout.height}" font-family="monospace">',
            f"<title>{escape(one_line(plot.title))}</title>",
            f'<rect {size} fill="{BACKGROUND}"/>',
            f'<g fill="none" stroke="{_GRID}" transform="translate({_LEFT} {_TOP})">',
            *(f'<polyline points="{_points(line)}"/>' for line in layout.grid),
            "</g>",
            '<g fill="none" stroke-width="0.8">' + "".join(
                f'<polyline points="{_points(leader)}" stroke="{_lighter(color)}"/>'
                for leader, color in zip(layout.leaders, layout.colors, strict=True)
            ) + "</g>",
            f"<svg {inside}>",  # which clips the curves
            *(
                f"<g><title>{escape(one_line(curve.label))}</title>"
                + (f'<polygon points="{_points(band)}" fill="{color}" opacity="{_OPACITY}"/>'
                   if band else "")
                + f'<polyline points="{_points(line)}" fill="none" stroke="{color}"'
                f' stroke-width="1.8" stroke-linejoin="round"/>'
                + f'<circle cx="{line[-1][0]:.1f}" cy="{line[-1][1]:.1f}" r="2.5" fill="{color}"/>'
                "</g>"
                for curve, line, band, color in curves
            ),
            "</svg>",
            *(svg_text(box) for box in layout.texts if box.text),
            "</svg>\n",
        ]
    )  # fmt: skip


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def png(plot: CurvePlot) -> bytes:
    """Return the picture as the bytes of a PNG file; raises UsageError without Pillow."""
    fonts = load_fonts()
    from PIL import Image, ImageDraw

    def width(text: str, size: int) -> float:
        return fonts[size].getlength(font_text(text, fonts[size]))

    layout = CurveLayout(plot, width)
    picture = Image.new("RGB", (layout.width, layout.height), BACKGROUND)
    picture.paste(_draw_plot(layout), (_LEFT, _TOP))
    for points, color in zip(layout.leaders, layout.colors, strict=True):
        ImageDraw.Draw(picture).line(points, fill=_lighter(color))
    texts = [replace(box, text=font_text(box.text, fonts[box.size])) for box in layout.texts]
    return finish_png(picture, texts, fonts)


def _draw_plot(layout: CurveLayout) -> "Picture":
    """Return the inside of the axes, drawn larger and then reduced, so that lines are smooth."""
    from PIL import Image, ImageDraw

    size = (layout.plot_width * _FINER, layout.plot_height * _FINER)
    inside = Image.new("RGB", size, BACKGROUND)

    def finer(points: Sequence[Point]) -> list[Point]:
        return [(x * _FINER, y * _FINER) for x, y in points]

    for points in layout.grid:
        ImageDraw.Draw(inside).line(finer(points), fill=_GRID, width=_FINER)
    for points, color in zip(layout.bands, layout.colors, strict=True):
        if points:
            mask = Image.new("L", size)
            ImageDraw.Draw(mask).polygon(finer(points), fill=round(255 * _OPACITY))
            inside.paste(color, (0, 0), mask)
    for points, color in zip(layout.lines, layout.colors, strict=True):
        ImageDraw.Draw(inside).line(finer(points), fill=color, width=2 * _FINER, joint="curve")
    return inside.resize((layout.plot_width, layout.plot_height), Image.Resampling.BOX)
