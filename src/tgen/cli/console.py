"""Terminal output: results go to stdout, everything else to stderr."""

import io
import os
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TextIO, cast

from rich.console import Console

from tgen.errors import TgenError


class _Stderr(io.TextIOBase):
    """A stderr that may fail, as on a dead terminal or a full disk, without stopping the work."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Write to the current stderr; errors are ignored."""
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the current stderr; errors are ignored."""
        self._try(lambda stream: stream.flush())

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


def _real_stderr() -> TextIO | None:
    """Return stderr itself, not the proxy that rich installs while it draws a progress bar."""
    stream: TextIO | None = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return stream


class StdoutClosedError(Exception):
    """The reader of stdout closed the pipe: the command ends without an error."""

    exit_status = 0


class _Output(Console):
    """A stdout whose reader may close the pipe at any time."""

    def on_broken_pipe(self) -> None:
        """Raise StdoutClosedError, where rich would end the process."""
        raise StdoutClosedError


err = Console(
    file=cast(IO[str], _Stderr()), highlight=False, markup=False, emoji=False, soft_wrap=True
)
out = _Output(highlight=False, markup=False, emoji=False)
_wide = _Output(
    highlight=False, markup=False, emoji=False, width=1000
)  # for lines that must not wrap


def ensure_standard_fds() -> None:
    """Open /dev/null as stdin, stdout or stderr where one was closed.

    Otherwise the next opened file would get its descriptor, and what libraries write to stderr.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, this one


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
        data = printable(data.decode("utf-8", errors="replace")).encode(errors="replace")
    with _stdout_errors():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def show(*things: object, wrap: bool = True) -> None:
    """Print tables and lines to stdout; errors as in `write`. Without `wrap`, lines stay whole."""
    require_stdout()
    with _stdout_errors():
        (out if wrap else _wide).print(*things, sep="\n", soft_wrap=not wrap)
        sys.stdout.flush()


def has_color_ramp() -> bool:
    """Return whether stdout has 256 colors or more; else turn color off: 16 make no ramp."""
    if out.color_system not in ("256", "truecolor"):
        out.no_color = True
    return not out.no_color


def print_status(text: str, *, quiet: bool = False) -> None:
    """Print a line to stderr."""
    if not quiet:
        err.print(text)


def print_try_generate(model: object, *, quiet: bool = False) -> None:
    """Print the command that generates from a new model."""
    command = f'tgen generate --model {shlex.quote(str(model))} --prompt "What is"'
    print_status(f"try: {command}", quiet=quiet)


def print_error(message: str, hint: str = "") -> None:
    """Print an error and its hint to stderr, one line each."""
    print_status(f"error: {message}")
    if hint:
        print_status(f"hint: {hint}")


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


def printable(text: str) -> str:
    """Escape control and direction characters; line breaks and tabs stay."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else f"\\u{ord(c):04x}"
        for c in text
    )


@contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """Show a progress bar with time left on stderr; yield a function to set the fraction."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label, markup=False), BarColumn(bar_width=24), TimeRemainingColumn())
    hidden = quiet or not err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=hidden) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)
