"""Heat maps are readable in every palette: ordered, distinct, with contrast to their text."""

import io

import pytest
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tgen.cli import console, rich_console
from tgen.drawing.colormap import color_at, highlight, is_light, luminance, terminal_color

SHADES = [i / 100 for i in range(101)]


def _contrast(first: float, second: float) -> float:
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)


def test_black_or_white_text_has_contrast_on_every_color():
    for shade in SHADES:
        text = 0.0 if is_light(color_at(shade)) else 1.0
        assert _contrast(luminance(color_at(shade)), text) >= 4.5


def _shown(color: Color, system: ColorSystem) -> float:
    return luminance(color.downgrade(system).get_truecolor())


@pytest.mark.parametrize(
    ("system", "n_distinct"), [(ColorSystem.TRUECOLOR, 100), (ColorSystem.EIGHT_BIT, 11)]
)
def test_more_is_lighter_in_every_palette(system, n_distinct):
    shown = [_shown(terminal_color(shade), system) for shade in SHADES]
    assert shown == sorted(shown)
    assert len(set(shown)) >= n_distinct


@pytest.mark.parametrize("system", [ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT])
def test_text_has_contrast_in_every_palette(system):
    for shade in SHADES:
        style = highlight(shade)
        assert style.color is not None
        assert style.bgcolor is not None
        shown = _contrast(_shown(style.color, system), _shown(style.bgcolor, system))
        assert shown >= 4.3, shade


@pytest.mark.parametrize(
    ("environment", "has_ramp", "codes"),
    [
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, True, "\x1b[38;2;255;255;255;48;2;68;1;84m"),
        ({"TERM": "xterm-256color"}, True, "\x1b[38;5;16;48;5;220m"),
        ({"TERM": "xterm"}, False, ""),
        ({"TERM": "linux"}, False, ""),
        ({"TERM": "dumb"}, False, ""),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False, ""),
        ({"TERM": "xterm", "COLORTERM": "truecolor", "NO_COLOR": "1"}, False, ""),
    ],
)
def test_a_terminal_without_a_ramp_gets_characters(environment, has_ramp, codes, monkeypatch):
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, _environ=environment)
    monkeypatch.setattr(rich_console, "out", terminal)
    assert console.has_color_ramp() == has_ramp
    shade = 0.0 if "COLORTERM" in environment else 1.0
    Style._add.cache_clear()  # rich keeps the codes of equal styles, whatever the terminal
    terminal.print(Text("7", highlight(shade)))
    assert file.getvalue() == (f"{codes}7\x1b[0m\n" if codes else "7\n")
