"""`tgen generate --interactive`: reads lines at a terminal, which are texts or commands."""

import contextlib
import os
import sys

from tgen.cli import console
from tgen.cli.generate.chat import Session
from tgen.cli.generate.chat_commands import run_command
from tgen.errors import TgenError, UsageError

_PROMPT = "> "
_MIN_COLUMNS = 10  # GNU readline divides by zero in a terminal of 3


def require_terminal() -> None:
    """Raise UsageError unless stdin and stdout are a terminal."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        hint = "remove --interactive, and pipe text in or pass --prompt"
        raise UsageError("--interactive needs a terminal", hint)


def run_session(session: Session, prompt: bytes) -> None:
    """Answer the prompt, if any, and read lines until the end of input.

    Ctrl-C stops a text, Ctrl-D on an empty line ends.
    """
    stops = "a text" if session.start is None else "an answer"
    continues = "; an empty line continues the text" if session.start is None else ""
    console.print_line(f"Ctrl-C stops {stops}, Ctrl-D ends the session{continues}")
    console.print_line("/help lists the commands")
    if prompt:
        if session.start is None:
            console.write(prompt)
        session.answer(prompt)
    while (line := read_line()) is not None:
        if line.startswith(b"/") and not line.startswith(b"//"):
            try:
                run_command(session, line)
            except TgenError as error:
                console.print_error(error.message, error.hint)
            except KeyboardInterrupt:
                console.print_line("stopped")
        elif line or session.start is None:
            session.answer(line.removeprefix(b"/"))


def read_line() -> bytes | None:
    """Return the typed line; None at the end of input."""
    _import_readline()
    while True:
        try:
            return os.fsencode(input(_PROMPT))
        except EOFError:
            console.write(b"\n")
            return None
        except KeyboardInterrupt:  # discards the line, as shells do
            console.write(b"\n")


def _import_readline() -> None:
    """Turn on line editing, except where GNU readline crashes at Ctrl-C."""
    try:
        columns = os.get_terminal_size().columns
    except OSError:
        columns = 0
    if os.environ.get("TERM", "dumb") == "dumb" or 0 < columns < _MIN_COLUMNS:
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing)
