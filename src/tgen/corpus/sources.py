"""Sources of text: files, directories, glob patterns and stdin, with random access."""

import glob
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from tgen.errors import CorpusError, TgenError
from tgen.storage import files

_BLOCK = 1 << 22  # bytes of stdin per read
_STDIN_IN_RAM = 1 << 24  # bytes; longer input is stored in a temporary file


class Source:
    """Bytes that are read several times and must not change in between: a file, or stdin's."""

    def __init__(self, name: str, content: Path | files.RandomAccessFile | bytes) -> None:
        self.name = name
        self._content = content
        self._file = self._open()
        self._stamp = None if self._file is None else self._file.stamp

    @property
    def n_bytes(self) -> int:
        """Bytes of the source."""
        if isinstance(self._content, bytes):
            return len(self._content)
        assert self._stamp is not None
        return self._stamp[0]

    def read(self, start: int, n: int) -> bytes:
        """Return `n` bytes from `start`, fewer at the end; raises CorpusError if it has changed."""
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

    def close(self) -> None:
        """Close until the next read; raises CorpusError if it has changed since it was opened."""
        if isinstance(self._content, Path):
            self._check_unchanged()
            self._file = None

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


def open_sources(paths: Sequence[str], skipped: list[str]) -> Iterator[Source]:
    """Open everything the paths name, in order; append binary files in directories to `skipped`."""
    for path in paths:
        if path == "-":
            yield _read_stdin()
        elif Path(path).is_dir():
            yield from _open_directory(Path(path), skipped)
        elif not Path(path).exists() and any(wildcard in path for wildcard in "*?["):
            matches = sorted(m for m in glob.glob(path, recursive=True) if Path(m).is_file())
            if not matches:
                raise CorpusError(f"no file matches {path!r}", "quote the pattern and check it")
            for match in matches:
                yield Source(match, Path(match))
        else:
            yield Source(path, Path(path))


def _open_directory(folder: Path, skipped: list[str]) -> Iterator[Source]:
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if hidden or not file.is_file():
            continue
        source = Source(str(file), file)
        if b"\0" in source.read(0, 8192):
            skipped.append(str(file))
        else:
            yield source


def stdin() -> BinaryIO:
    """Return stdin; raises CorpusError if it is closed."""
    if sys.stdin is None:
        raise CorpusError("stdin is closed", "pipe text in, or pass a file")
    return sys.stdin.buffer


def _read_stdin() -> Source:
    data = stdin().read(_STDIN_IN_RAM)
    if len(data) < _STDIN_IN_RAM:
        return Source("-", data)
    try:
        spool = files.open_temporary(None)
        while data:
            spool.append(data)
            data = stdin().read(_BLOCK)
    except OSError as error:
        raise CorpusError(
            f"cannot store stdin in a temporary file: {error.strerror}",
            "free disk space, or save the text to a file and pass its path",
        ) from None
    return Source("-", spool)
