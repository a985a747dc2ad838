"""Read lines of a file or a pipe as soon as they arrive."""

import errno
import os
import threading
from pathlib import Path
from queue import Empty, Queue

from tgen.errors import TgenError, UsageError
from tgen.storage import files

_BLOCK, _LINES_AHEAD = 1 << 16, 4096
_MAX_LINE = 64 << 20  # bytes


class LineReader:
    """A reader of lines in a background thread; the path `-` is stdin."""

    def __init__(self, path: str) -> None:
        self._lines: Queue[bytes | OSError | UsageError | None] = Queue(_LINES_AHEAD)
        self._fd, self._size = 0, 0
        if path != "-":
            try:
                with files.open_stream(Path(path)) as file:
                    self._fd = os.dup(file.fileno())
                    self._size = os.fstat(self._fd).st_size
            except TgenError as error:
                raise TgenError(f"--input: {error.message}", error.hint) from None
        self._finished, self._n_read = False, 0
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def fraction(self) -> float | None:
        """Fraction of the file that was read; None for a pipe."""
        return min(1.0, self._n_read / self._size) if self._size else None

    def next(self, *, wait: bool) -> bytes | None:
        """Return the next line without its line break; None if none has arrived, or at the end.

        Raises OSError if the file cannot be read, UsageError for a line that is too long.
        """
        if self._finished:
            return None
        try:
            line = self._lines.get(wait)
        except Empty:
            return None
        if not isinstance(line, bytes):
            self._finished = True
            if line is not None:
                raise line
            return None
        self._lines.task_done()
        self._n_read += len(line) + 1
        return line

    def _read(self) -> None:
        parts: list[bytes] = []  # parts of an incomplete line
        end: OSError | UsageError | None = None
        n_bytes = 0  # total size of the parts
        try:  # not sys.stdin, whose lock would be held at process exit
            while block := os.read(self._fd, _BLOCK):
                first, *others = block.split(b"\n")
                parts.append(first)
                n_bytes = len(others[-1]) if others else n_bytes + len(first)
                if n_bytes > _MAX_LINE:
                    parts = []
                    raise UsageError(
                        f"a line of the input is larger than {_MAX_LINE >> 20} MiB",
                        "pass one prompt per line",
                    )
                for part in others:
                    line = b"".join(parts).removesuffix(b"\r")
                    parts = [part]
                    self._lines.put(line)
                    if len(line) > _BLOCK:  # of long lines, only one at a time takes memory
                        self._lines.join()
        except UsageError as error:
            end = error
        except OSError as error:
            if self._fd or error.errno != errno.EBADF:  # a closed stdin has no lines
                end = error
        if any(parts):
            self._lines.put(b"".join(parts))
        self._lines.put(end)
