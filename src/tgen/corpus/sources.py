"""Sources of text with random access: files, parts of files, stdin and converted content."""

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

from tgen.corpus.steps import Steps
from tgen.errors import CorpusError, TgenError
from tgen.storage import files

_BLOCK = 1 << 20  # bytes per read
_PIPE_IN_RAM = 1 << 24  # bytes; longer input is stored in a temporary file

_MAX_READ = 1 << 26  # bytes that a library may request at once, for example a file's directory


class Source:
    """Bytes that are read several times and must not change in between.

    They are a file, stdin or converted content, or `n_bytes` of these from `start` on. `has_rows`:
    they are JSON Lines. `position` is the end of the bytes that were read last, `done` the fraction
    of a corpus until the end of this source.
    """

    def __init__(
        self,
        name: str,
        content: Path | files.RandomAccessFile | bytes,
        *,
        start: int = 0,
        n_bytes: int | None = None,
    ) -> None:
        self.name, self.has_rows, self.position, self.done = name, False, 0, 0.0
        self._content = content
        self._file = self._open()
        self._stamp = None if self._file is None else self._file.stamp
        n_stored = self._stamp[0] if self._stamp else len(content)  # type: ignore[arg-type]
        self._start, self.n_bytes = start, n_stored - start if n_bytes is None else n_bytes

    @property
    def path(self) -> Path | None:
        """The file that has these bytes and no others."""
        is_whole = self._stamp is not None and self.n_bytes == self._stamp[0]
        return self._content if isinstance(self._content, Path) and is_whole else None

    def part(self, name: str, start: int, n_bytes: int) -> "Source":
        """Return `n_bytes` from `start` on as a source."""
        content = self._content if isinstance(self._content, bytes) else self._file or self._open()
        assert content is not None
        return Source(name, content, start=self._start + start, n_bytes=n_bytes)

    def read(self, start: int, n: int) -> bytes:
        """Return `n` bytes from `start`, fewer at the end; raises CorpusError if it has changed."""
        n = max(0, min(n, self.n_bytes - start))
        self.position, start = start + n, self._start + start
        if isinstance(self._content, bytes):
            return self._content[start : start + n]
        if self._file is None:
            self._file = self._open()
            self._check_unchanged()
        assert self._file is not None
        try:
            return self._file.read(start, n)
        except OSError as error:
            raise CorpusError(f"cannot read {self.name}: {error.strerror}") from None

    def blocks(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` to `end`, by default all; CorpusError if some are gone."""
        end = self.n_bytes if end is None else end
        for position in range(start, end, _BLOCK):
            n = min(_BLOCK, end - position)
            block = self.read(position, n)
            if len(block) < n:
                raise self.changed_error()
            yield block

    def copy(self) -> files.RandomAccessFile:
        """Return a temporary file with these bytes; raises CorpusError if the disk is full."""
        with storing(self.name):
            copy = files.open_temporary(None)
            for block in self.blocks():
                copy.append(block)
        return copy

    def close(self) -> None:
        """Close until the next read; raises CorpusError if it has changed since it was opened."""
        if isinstance(self._content, Path):
            self._check_unchanged()
            self._file = None

    def discard(self) -> None:
        """Close after an error, without a check; errors keep what they were raised for."""
        self._content, self._file = b"", None

    def changed_error(self) -> CorpusError:
        """Return the error for a source that has changed."""
        return CorpusError(
            f"{self.name} changed while it was being read",
            "wait until no other program writes to it",
        )

    def _check_unchanged(self) -> None:
        if self._file is not None and self._file.stamp != self._stamp:
            raise self.changed_error()

    def _open(self) -> files.RandomAccessFile | None:
        if isinstance(self._content, bytes):
            return None
        if isinstance(self._content, files.RandomAccessFile):
            return self._content
        try:
            return files.open_random_access(self._content)
        except TgenError as error:
            hint = error.hint or "pass a readable text file"
            raise CorpusError(error.message, hint) from None


@contextmanager
def storing(what: str, hint: str = "free disk space") -> Iterator[None]:
    """Turn the error of a full disk into CorpusError."""
    try:
        yield
    except OSError as error:
        message = f"cannot store {what} in a temporary file: {error.strerror}"
        raise CorpusError(message, hint) from None


class SourceFile(io.RawIOBase):
    """A source as a file for libraries, which can neither read nor store all of it at once."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source, self._position = source, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position as other files do."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.n_bytes}
        self._position = max(0, base[whence] + offset)
        return self._position

    def read(self, n: int = -1) -> bytes:
        """Return the next `n` bytes, by default all; raise OSError for more than 64 MiB."""
        n = max(0, self._source.n_bytes - self._position) if n is None or n < 0 else n
        if n > _MAX_READ:
            raise OSError(f"a part of the file has {n:,} bytes")
        data = self._source.read(self._position, n)
        self._position += len(data)
        return data


class Spool:
    """A temporary file with all converted content of a corpus, so that many sources need one file
    descriptor. The system removes it with the last source."""

    def __init__(self) -> None:
        self._file: files.RandomAccessFile | None = None
        self._n_bytes = 0

    def store(
        self, name: str, blocks: Iterable[bytes], origin: Source | None = None
    ) -> Steps[Source]:
        """Return the blocks as a source; yield how much of the one that they are made from is read.

        Raise CorpusError if the disk is full, and the errors of `blocks`, which may store other
        content before its first block.
        """
        start = None
        for block in blocks:
            start = self._n_bytes if start is None else start
            with storing(name, "free disk space in the directory that TMPDIR names"):
                self._file = self._file or files.open_temporary(None)
                self._file.append(block)
            self._n_bytes += len(block)
            if origin is not None:
                yield origin.position / max(1, origin.n_bytes)
        if self._file is None or start is None:
            return Source(name, b"")
        return Source(name, self._file, start=start, n_bytes=self._n_bytes - start)


def stdin() -> BinaryIO:
    """Return stdin; raises CorpusError if it is closed."""
    if sys.stdin is None:
        raise CorpusError("stdin is closed", "pipe text in, or pass a file")
    return sys.stdin.buffer


def read_pipe(name: str, head: bytes = b"") -> Source:
    """Return `head` and all of a pipe, or of stdin, which is "-", as a source; raise CorpusError if
    it cannot be stored."""
    with nullcontext(stdin()) if name == "-" else files.open_stream(Path(name)) as stream:
        data = head + stream.read(_PIPE_IN_RAM)
        if len(data) < _PIPE_IN_RAM:
            return Source(name, data)
        what = "stdin" if name == "-" else name
        with storing(what, "free disk space, or save the text to a file and pass its path"):
            spool = files.open_temporary(None)
            while data:
                spool.append(data)
                data = stream.read(_BLOCK)
    return Source(name, spool)
