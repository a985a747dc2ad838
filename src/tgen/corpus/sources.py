"""Sources of text: files, directories, glob patterns and stdin, with random access."""

import glob
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, NoReturn

from tgen.errors import CorpusError, TgenError
from tgen.storage import files

_BLOCK = 1 << 22  # bytes of stdin per read
_MAX_NAMED = 8  # models and runs in a note
_LOCK = "LOCK"  # file of a run
_STDIN_IN_RAM = 1 << 24  # bytes; longer input is stored in a temporary file

OwnFiles = Callable[[Path], set[str]]


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


@dataclass
class Skipped:
    """Files, models and runs that a corpus skips."""

    binary: list[str] = field(default_factory=list)  # files in directories
    models: dict[str, None] = field(default_factory=dict)  # directories and files, in order

    def notes(self) -> list[str]:
        """Return what was skipped, and why, as lines for the user."""
        lines = [f"skipped {name}: not a text file" for name in self.binary]
        if self.models:
            names, n = list(self.models), len(self.models)
            more = f" and {n - _MAX_NAMED} more" if n > _MAX_NAMED else ""
            what = "1 model or run" if n == 1 else f"{n} models and runs"
            lines.append(f"skipped {what} in the corpus: {', '.join(names[:_MAX_NAMED])}{more}")
        return lines


def open_sources(
    paths: Sequence[str], skipped: Skipped, own_files: OwnFiles = lambda _: set()
) -> Iterator[Source]:
    """Open everything the paths name, in order; add to `skipped` the binary files in directories,
    and the models and runs in directories and among the matches of patterns.

    `own_files` returns the names of the files of a model or a run in a directory. Below a directory
    or a pattern, a directory with such files is skipped; in itself, only these files are.
    """
    own_files = cache(own_files)
    for path in paths:
        if path == "-":
            yield _read_stdin()
        elif Path(path).is_dir():
            for file in _list_files(Path(path)):
                if not _is_own(file, Path(path), skipped, own_files):
                    source = Source(str(file), file)
                    if b"\0" in source.read(0, 8192):
                        skipped.binary.append(str(file))
                    else:
                        yield source
        elif not Path(path).exists() and _has_wildcard(path):
            matches = sorted(m for m in glob.glob(path, recursive=True) if Path(m).is_file())
            if not matches:
                raise CorpusError(f"no file matches {path!r}", "quote the pattern and check it")
            base = Path(*takewhile(lambda part: not _has_wildcard(part), Path(path).parts))
            for match in matches:
                if not _is_own(Path(match), base, skipped, own_files):
                    source = Source(match, Path(match))
                    if _has_weights(source):
                        skipped.models[match] = None
                    else:
                        yield source
        else:
            yield Source(path, Path(path))


def _has_wildcard(path: str) -> bool:
    return any(wildcard in path for wildcard in "*?[")


def _list_files(folder: Path) -> list[Path]:
    """Return the files below a directory that are not hidden; links to directories are not
    followed. Raises CorpusError for a directory that cannot be read."""
    found: list[Path] = []
    for directory, folders, names in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(directory, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


def _raise_unreadable(error: OSError) -> NoReturn:
    message = f"cannot read {error.filename}: {error.strerror}"
    raise CorpusError(message, "make the directory readable, or name the other files") from None


def _is_own(file: Path, base: Path, skipped: Skipped, own_files: OwnFiles) -> bool:
    """Return whether a file below `base` is part of a model or a run, and add that to `skipped`."""
    below = file.relative_to(base).parts
    for depth, name in enumerate(below):
        directory = base.joinpath(*below[:depth])
        if (own := own_files(directory)) and (depth or name in own):
            if file.name != _LOCK:  # of the run that reads this corpus, whose directory is new
                skipped.models[str(directory)] = None
            return True
    return False


def _has_weights(source: Source) -> bool:
    """Return whether a file is a GGUF or a safetensors file, such as a prompt cache."""
    head = source.read(0, 16)
    is_header = head[8:9] == b"{" and int.from_bytes(head[:8], "little") < source.n_bytes
    return b"\0" in head and (is_header or head.startswith(b"GGUF"))


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
