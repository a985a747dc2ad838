"""Rich's consoles on stdout and stderr; `tgen.cli.console` imports them when they are needed."""

import os
from collections.abc import Iterable
from typing import IO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tgen.cli.streams import StdoutClosedError, stderr
from tgen.drawing.terminal_text import drawing_fallbacks, printable


class _SafeConsole(Console):
    """A console that escapes all its text, and replaces drawing characters its encoding lacks."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as rich does; only rich's own control codes reach the terminal unchanged."""
        fallbacks = drawing_fallbacks(self.encoding)
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
                continue
            text, style = printable(segment.text), segment.style
            if fallbacks and not text.isascii():
                text = text.translate(fallbacks)
            if style is not None and style.link is not None:  # a library's own escape sequence
                style = style.update_link(None)
            yield Segment(text, style)


class _Output(_SafeConsole):
    """A stdout whose reader may close the pipe at any time."""

    def on_broken_pipe(self) -> None:
        """Raise StdoutClosedError, where rich would end the process."""
        raise StdoutClosedError


if os.environ.get("COLUMNS") == "0":  # of a terminal that does not know its width, as in Emacs
    del os.environ["COLUMNS"]
err = _SafeConsole(
    file=cast(IO[str], stderr), highlight=False, markup=False, emoji=False, soft_wrap=True
)
out = _Output(highlight=False, markup=False, emoji=False)
wide = _Output(highlight=False, markup=False, emoji=False, width=1000)  # never wraps


def curve_width() -> int:
    """Return the columns of curves on stdout: all of a terminal, 80 elsewhere."""
    return out.width if out.is_terminal else 80
