"""Files, folders, glob patterns and stdin, as what can be read again and by position."""

import glob
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tgen.errors import CorpusError, TgenError
from tgen.storage import files

_BLOCK = 1 << 22  # bytes of stdin that are read together
_STDIN_IN_MEMORY = 1 << 24  # bytes; what is longer goes to a temporary file


class Source:
    """Bytes that are read several times and must not change between: a file, or what stdin held."""

    def __init__(self, name: str, content: Path | files.ByPosition | bytes) -> None:
        self.name = name
        self._content = content
        self._file = self._open()
        self._stamp = None if self._file is None else self._file.stamp

    def read(self, start: int, n: int) -> bytes:
        """The `n` bytes from `start` on, fewer at its end; raises CorpusError if it has changed."""
        if isinstance(self._content, bytes):
            return self._content[start : start + n]
        if self._file is None:
            self._file = self._open()
            self._check()
        assert self._file is not None
        try:
            return self._file.read(start, n)
        except OSError as error:
            raise CorpusError(f"{self.name} cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Until it is read again; raises CorpusError if it has changed since it was opened."""
        if isinstance(self._content, Path):
            self._check()
            self._file = None

    def changed(self) -> CorpusError:
        """What there is to say of a source that is not what it was."""
        return CorpusError(
            f"{self.name} has changed while it was read", "wait until nothing writes to it"
        )

    def _check(self) -> None:
        if self._file is not None and self._file.stamp != self._stamp:
            raise self.changed()

    def _open(self) -> files.ByPosition | None:
        if isinstance(self._content, bytes):
            return None
        if isinstance(self._content, files.ByPosition):
            return self._content
        try:
            return files.by_position(self._content)
        except TgenError as error:
            hint = error.hint or "name a readable file of text"
            raise CorpusError(error.message, hint) from None


def sources(paths: Sequence[str], skipped: list[str]) -> Iterator[Source]:
    """What the paths name, in order; files of a folder that are no text are `skipped`."""
    for path in paths:
        if path == "-":
            yield _stdin()
        elif Path(path).is_dir():
            for file in sorted(Path(path).rglob("*")):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.is_file() and not hidden:
                    source = Source(str(file), file)
                    if b"\0" in source.read(0, 8192):
                        skipped.append(str(file))
                    else:
                        yield source
        elif not Path(path).exists() and any(mark in path for mark in "*?["):
            matches = sorted(m for m in glob.glob(path, recursive=True) if Path(m).is_file())
            if not matches:
                raise CorpusError(f"no file matches {path!r}", "quote the pattern and check it")
            for match in matches:
                yield Source(match, Path(match))
        else:
            yield Source(path, Path(path))


def _stdin() -> Source:
    if sys.stdin is None:
        raise CorpusError("stdin is closed", "pipe a text in, or name a file")
    kept = sys.stdin.buffer.read(_STDIN_IN_MEMORY)
    if len(kept) < _STDIN_IN_MEMORY:
        return Source("-", kept)
    try:
        spool = files.temporary(None)
        while kept:
            spool.append(kept)
            kept = sys.stdin.buffer.read(_BLOCK)
    except OSError as error:
        raise CorpusError(
            f"stdin is long, and no temporary file can hold it: {error.strerror}",
            "make room there, or put the text into a file and name it",
        ) from None
    return Source("-", spool)
