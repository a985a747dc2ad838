"""Lines of a file, and of a pipe as soon as they are there."""

import errno
import os
import threading
from pathlib import Path
from queue import Empty, Queue

from tgen.storage import files

_BLOCK, _LINES_AHEAD = 1 << 16, 4096


class LineReader:
    """Reads with a thread of its own; `path` may be `-`, which is stdin."""

    def __init__(self, path: str) -> None:
        self._lines: Queue[bytes | OSError | None] = Queue(_LINES_AHEAD)
        self._fd, self._size = 0, 0
        if path != "-":
            with files.open_stream(Path(path)) as file:
                self._fd = os.dup(file.fileno())
                self._size = os.fstat(self._fd).st_size
        self._over, self._taken = False, 0
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def fraction(self) -> float | None:
        """How much of a file has been taken; None: that cannot be known."""
        return min(1.0, self._taken / self._size) if self._size else None

    def next(self, *, wait: bool) -> bytes | None:
        """The next line without its end. None: there is none now, or, after waiting, no more.

        Raises OSError where the file cannot be read any further.
        """
        if self._over:
            return None
        try:
            line = self._lines.get(wait)
        except Empty:
            return None
        if not isinstance(line, bytes):
            self._over = True
            if line is not None:
                raise line
            return None
        self._taken += len(line) + 1
        return line

    def _read(self) -> None:
        parts: list[bytes] = []  # of a line that has not ended
        end: OSError | None = None
        try:  # not through sys.stdin: its lock would be held while the process ends
            while block := os.read(self._fd, _BLOCK):
                first, *others = block.split(b"\n")
                parts.append(first)
                for part in others:
                    self._lines.put(b"".join(parts).removesuffix(b"\r"))
                    parts = [part]
        except OSError as error:
            if self._fd or error.errno != errno.EBADF:  # stdin that is closed has no lines
                end = error
        if any(parts):
            self._lines.put(b"".join(parts))
        self._lines.put(end)
