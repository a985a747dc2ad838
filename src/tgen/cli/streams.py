"""Python's stdout and stderr, made safe: a dead terminal, a closed pipe and control characters."""

import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

from tgen.drawing.terminal_text import printable


class Stderr(io.TextIOBase):
    """A stderr that may fail, as on a dead terminal or a full disk, without stopping the work."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the real stderr."""
        return getattr(_real_stderr(), "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write to the current stderr; errors are ignored. Only a terminal gets trailing spaces."""
        shown = text if self.isatty() else strip_lines(text)
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


def strip_lines(text: str) -> str:
    """Return the text without spaces at the end of its lines."""
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


def discard_stdout() -> None:
    """Discard what stdout still buffers, so that Python does not fail on it at exit."""
    if sys.stdout is not None:
        _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    """Send buffered and future output to /dev/null."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)
