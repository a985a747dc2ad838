"""Terminal output: results go to stdout, everything else to stderr."""

import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TextIO, cast

from tgen.drawing.terminal_text import drawing_fallbacks, one_line, printable
from tgen.errors import TgenError


class Stderr(io.TextIOBase):
    """A stderr that may fail, as on a dead terminal or a full disk, without stopping the work."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the real stderr."""
        return getattr(_real_stderr(), "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write to the current stderr; errors are ignored. Only a terminal gets trailing spaces."""
        shown = text if self.isatty() else _strip_lines(text)
        self._try(lambda stream: stream.write(shown))
        return len(text)

    def flush(self) -> None:
        """Flush the current stderr; errors are ignored."""
        self._try(lambda stream: stream.flush())

    def close(self) -> None:
        """Do nothing: Python calls it at its end, when the names of this module are gone."""

    def isatty(self) -> bool:
        """Return whether stderr is a terminal."""
        stream = _real_stderr()
        return stream is not None and stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the real stderr, whose width rich reads."""
        stream = _real_stderr()
        if stream is None:
            raise OSError("stderr is closed")
        return stream.fileno()

    def _try(self, action: Callable[[TextIO], object]) -> None:
        stream = _real_stderr()
        if stream is not None:
            try:
                action(stream)
            except OSError:
                _silence(stream)


def _strip_lines(text: str) -> str:
    return re.sub(r" +(?=\n)", "", text)


def _real_stderr() -> TextIO | None:
    """Return stderr itself, behind `_EscapedStderr` and rich's proxy during a progress bar."""
    stream: Any = sys.stderr
    while (proxied := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = proxied
    return cast(TextIO | None, stream)


class _EscapedStderr:
    """The stderr of everything but this module: warnings, logging and tracebacks, escaped."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # the attribute name that rich's proxy uses

    def write(self, text: str) -> int:
        """Write the text without control characters."""
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


stderr = Stderr()


class StdoutClosedError(Exception):
    """The reader of stdout closed the pipe: the command ends without an error."""

    exit_status = 0


def ensure_standard_fds() -> None:
    """Open /dev/null as stdin, stdout or stderr where one was closed.

    Otherwise the next opened file would get its descriptor, and what libraries write to stderr.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, this one


def adapt_streams() -> None:
    """Make stdout and stderr accept any text, and escape what libraries write to stderr.

    Files and pipes get UTF-8 regardless of the locale; a terminal keeps its own encoding.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = None if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
    if sys.stderr is not None:
        sys.stderr = cast(TextIO, _EscapedStderr(sys.stderr))


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
            sys.stdout.write(_strip_lines(lines.get()))
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


def print_status(text: str, *, quiet: bool = False, is_command: bool = False) -> None:
    """Print one line to stderr. A terminal breaks it between words or, if it is a command to copy,
    nowhere."""
    if not quiet:
        _print_line(text, is_command=is_command)


def ask(question: str) -> None:
    """Print a question to stderr; the answer follows on the same line."""
    _print_line(question, end=" ")


def print_try_generate(model: object, *, chat: bool = False, quiet: bool = False) -> None:
    """Print the command that generates from a new model, or that chats with it."""
    how = "--chat --interactive" if chat else '--prompt "What is"'
    command = f"tgen generate --model {shlex.quote(str(model))} {how}"
    print_status(f"try: {command}", quiet=quiet, is_command=True)


def print_error(message: str, hint: str = "") -> None:
    """Print an error and its hint to stderr, one line each."""
    print_status(f"error: {message}")
    if hint:
        print_status(f"hint: {hint}")


def _print_line(text: str, end: str = "\n", *, is_command: bool = False) -> None:
    """Print one line to stderr, above a progress bar if there is one. Rich breaks long ones."""
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


def discard_stdout() -> None:
    """Discard what stdout still buffers, so that Python does not fail on it at exit."""
    if sys.stdout is not None:
        _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    """Send buffered and future output to /dev/null."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


@contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """Show a progress bar with time left on stderr; yield a function to set the fraction."""
    if quiet or not draws_progress():
        yield lambda _: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tgen.cli.rich_console import err

    columns = (TextColumn(label, markup=False), BarColumn(bar_width=24), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)
