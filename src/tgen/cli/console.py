"""Terminal output: results go to stdout; messages and progress bars to stderr."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress

from tgen.cli.streams import StdoutClosedError, discard_stdout, stderr, strip_lines
from tgen.drawing.terminal_text import drawing_fallbacks, one_line, printable
from tgen.errors import TgenError

command_words: list[str] = []  # after `tgen`
quiet = False  # by --quiet, and on ranks whose output another one prints
_MOMENT_SECONDS = 0.5
_PROMPT_CHARACTERS = 60


def require_stdout() -> None:
    """Raise TgenError if stdout is closed."""
    if sys.stdout is None:
        raise TgenError("stdout is closed")


def write(data: bytes) -> None:
    """Write bytes to stdout unchanged, at once; on a terminal, control characters are escaped.

    Raises StdoutClosedError if the pipe is closed, TgenError if writing fails otherwise.
    """
    require_stdout()
    if sys.stdout.isatty():
        text = printable(data.decode("utf-8", errors="replace"))
        data = text.encode(sys.stdout.encoding or "utf-8", errors="backslashreplace")
    with _stdout_errors():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def show(*things: object, wrap: bool = True) -> None:
    """Print tables and lines to stdout; errors as in `write`. Without `wrap`, lines stay whole."""
    from tgen.cli.rich_console import out, wide

    require_stdout()
    console = out if wrap else wide
    with _stdout_errors():
        with nullcontext() if out.is_terminal else console.capture() as lines:
            console.print(*things, sep="\n", soft_wrap=not wrap)
        if lines is not None:
            sys.stdout.write(strip_lines(lines.get()))
        sys.stdout.flush()


def has_color_ramp() -> bool:
    """Return whether stdout has 256 colors or more, and half blocks; else turn color off."""
    from tgen.cli.rich_console import out

    lacks_blocks = ord("▀") in drawing_fallbacks(out.encoding)
    if out.color_system not in ("256", "truecolor") or lacks_blocks:  # 16 colors are too few
        out.no_color = True
    return not out.no_color


def draws_progress() -> bool:
    """Return whether stderr is a terminal on which a line can be redrawn; ignores FORCE_COLOR."""
    if not stderr.isatty():
        return False
    from tgen.cli.rich_console import err

    return not err.is_dumb_terminal


def print_status(text: str, *, is_command: bool = False) -> None:
    """Print one line as `print_line` does, unless `quiet`."""
    if not quiet:
        print_line(text, is_command=is_command)


def ask(question: str) -> None:
    """Print a question to stderr; the answer follows on the same line."""
    print_line(question, end=" ")


def print_try_generate(
    model: object, *, prompt: bytes = b"", chat: bool = False, exact: bool = False
) -> None:
    """Print the command that generates from a new model, or that chats with it. It has the last
    line of the `prompt` that can be typed, or all of it if it must be `exact`."""
    text = prompt.decode(errors="ignore")
    # "-" means stdin, and an argument of a command ends at NUL.
    if not exact or not text.strip("-") or "\0" in text:
        lines = [line.strip() for line in text.split("\n") if line.isprintable()]
        *_, text = ("", *(line[-_PROMPT_CHARACTERS:] for line in lines if line.strip("-")))
    how = "--chat --interactive" if chat else f"--prompt {_quote(text)}"
    command = f"tgen generate --model {shlex.quote(str(model))} {how}"
    print_status(f"try: {command}", is_command=True)


def _quote(text: str) -> str:
    """Return a text as a word of a shell command, on one line."""
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\n": "\\n", "\t": "\\t", "\\": "\\\\", "'": "\\'"}
    parts = (c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
    return "$'" + "".join(escapes.get(c, part) for c, part in zip(text, parts, strict=True)) + "'"


def print_error(message: str, hint: str = "") -> None:
    """Print an error and its hint to stderr, one line each."""
    print_line(f"error: {message}")
    if hint:
        print_line(f"hint: {hint}")


def print_line(text: str, end: str = "\n", *, is_command: bool = False) -> None:
    """Print one line to stderr, above a progress bar if there is one. A terminal breaks it between
    words or, if it is a command to copy, nowhere."""
    text = one_line(text)
    wraps = stderr.isatty() and not is_command
    if "tgen.cli.rich_console" in sys.modules or (wraps and not _fits_surely(text)):
        from tgen.cli.rich_console import err

        err.print(text, end=end, soft_wrap=not wraps)
    else:
        stderr.write(text.expandtabs().translate(drawing_fallbacks(stderr.encoding)) + end)
    stderr.flush()


def _fits_surely(text: str) -> bool:
    """Return whether a line fits on the terminal, even if all characters outside ASCII are wide."""
    columns = os.environ.get("COLUMNS", "")  # it has priority for Rich, too
    try:
        width = (
            int(columns) if columns.isdecimal() else os.get_terminal_size(stderr.fileno()).columns
        )
    except OSError:
        width = 0
    n_cells = len(text.expandtabs()) * (1 if text.isascii() else 2)
    return n_cells < (width or 80)


def close() -> None:
    """Flush stdout; raise StdoutClosedError if the pipe is closed."""
    if sys.stdout is not None:
        with _stdout_errors():
            sys.stdout.flush()


def flush() -> None:
    """Flush stdout and stderr; errors are ignored."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.flush()


@contextmanager
def _stdout_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise StdoutClosedError from None
    except OSError as error:
        discard_stdout()
        raise TgenError(f"stdout: {error.strerror}") from None


@contextmanager
def progress(label: str, *, hidden: bool = False) -> Iterator[Callable[[float], None]]:
    """Show a progress bar with time left on stderr; yield a function to set the fraction."""
    if hidden or quiet or not draws_progress():
        yield lambda _: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tgen.cli.rich_console import err

    columns = (TextColumn(label, markup=False), BarColumn(bar_width=24), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


@contextmanager
def late_progress(label: str) -> Iterator[Callable[[float], None]]:
    """Show a progress bar as `progress` does, if the block takes longer than a moment."""
    import time

    began, bars = time.monotonic(), ExitStack()
    update: Callable[[float], None] | None = None

    def show(fraction: float) -> None:
        nonlocal update
        if update is None and time.monotonic() - began >= _MOMENT_SECONDS:
            update = bars.enter_context(progress(label))
        if update is not None:
            update(fraction)

    with bars:
        yield show


@contextmanager
def announce(text: str) -> Iterator[None]:
    """Print a status line if the block takes longer than a moment."""
    import threading

    timer = threading.Timer(_MOMENT_SECONDS, print_status, [text])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
