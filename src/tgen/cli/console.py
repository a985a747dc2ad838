"""Where output goes: stdout carries the product, stderr the commentary."""

import io
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tgen.errors import TgenError


class _Commentary(io.TextIOBase):
    """A stderr whose loss never stops the work: a dead terminal, a full disk."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Writes to whatever stderr is now, as long as that takes it."""
        self._tried(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """As `write`."""
        self._tried(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        stream = _stderr()
        return stream is not None and stream.isatty()

    def fileno(self) -> int:
        """Of the real one, whose width rich asks for."""
        stream = _stderr()
        if stream is None:
            raise OSError("stderr is closed")
        return stream.fileno()

    def _tried(self, action: Callable[[TextIO], object]) -> None:
        stream = _stderr()
        if stream is not None:
            try:
                action(stream)
            except OSError:
                _silence(stream)


def _stderr() -> TextIO | None:
    """The real one: while a bar is drawn, rich puts itself in its place, and would call itself."""
    stream: TextIO | None = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return stream


class StdoutClosedError(Exception):
    """Whoever read stdout has closed it: there is nothing left to do, and no error."""

    exit_status = 0


class _Output(Console):
    """A stdout whose reader may leave at any time."""

    def on_broken_pipe(self) -> None:
        """Says so, where rich would end the process."""
        raise StdoutClosedError


err = Console(
    file=cast(IO[str], _Commentary()), highlight=False, markup=False, emoji=False, soft_wrap=True
)
out = _Output(highlight=False, markup=False, emoji=False)
_wide = _Output(highlight=False, markup=False, emoji=False, width=1000)  # where nothing has to fit


def ensure_standard_fds() -> None:
    """Puts something where stdin, stdout or stderr was closed: or the next file would be there,
    and get what a library writes to stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this


def require_stdout() -> None:
    """Raises TgenError if there is no stdout."""
    if sys.stdout is None:
        raise TgenError("stdout is closed")


def write(data: bytes) -> None:
    """Writes bytes to stdout at once, exactly; on a terminal, control characters are shown escaped.

    Raises ReaderGoneError if the pipe is closed, TgenError if it cannot be written otherwise.
    """
    require_stdout()
    if sys.stdout.isatty():
        data = printable(data.decode("utf-8", errors="replace")).encode(errors="replace")
    with _stdout_errors():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def show(*things: object, wrap: bool = True) -> None:
    """Draws tables and lines on stdout; errors as `write`. Without `wrap` a line stays one."""
    require_stdout()
    with _stdout_errors():
        (out if wrap else _wide).print(*things, sep="\n", soft_wrap=not wrap)
        sys.stdout.flush()


def print_status(text: str, *, quiet: bool = False) -> None:
    """One line of commentary."""
    if not quiet:
        err.print(text)


def print_error(message: str, hint: str = "") -> None:
    """What is wrong, and what to do about it, on a line each."""
    print_status(f"error: {message}")
    if hint:
        print_status(f"hint: {hint}")


def close() -> None:
    """Flushes stdout; raises ReaderGoneError if its reader has left."""
    if sys.stdout is not None:
        with _stdout_errors():
            sys.stdout.flush()


def flush() -> None:
    """What is held back goes out, if anybody takes it."""
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
        raise TgenError(f"stdout cannot be written: {error.strerror}") from None


def discard_stdout() -> None:
    """Keeps Python from complaining about stdout once more when it exits."""
    if sys.stdout is not None:
        _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    """What is still in it, and what comes, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def printable(text: str) -> str:
    """Text with control and direction characters written out; line breaks and tabs stay."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else f"\\u{ord(c):04x}"
        for c in text
    )


@contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """A bar on stderr with the time left; gives the function that takes the fraction done."""
    columns = (TextColumn(what, markup=False), BarColumn(bar_width=24), TimeRemainingColumn())
    hidden = quiet or not err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda done: bar.update(task, completed=done)
