"""Reading what may be replaced meanwhile: what comes out is of one model, never of two."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from tgen.errors import ModelError, TgenError

_TRIES = 3

_Model = TypeVar("_Model")


def read(path: Path, reading: Callable[[Path], _Model], *, watched: str) -> _Model:
    """What `reading` makes of a directory whose file `watched` goes first and comes back last when
    it is replaced; then it is read once more. Raises ModelError if that happens again and again."""
    for _ in range(_TRIES):
        before = _identity(path / watched)
        try:
            found = reading(path)
        except (TgenError, OSError):
            if _identity(path / watched) == before:
                raise
        else:
            if _identity(path / watched) == before:
                return found
    raise ModelError(f"{str(path)!r} changes while it is read", "try again once it stays as it is")


def stamp(files: Iterable[Path]) -> tuple[int, ...]:
    """Another one where a file has been replaced or written to."""
    return tuple(n for file in files for n in _numbers(file.stat()))


def _identity(path: Path) -> tuple[int, ...]:
    try:
        return _numbers(path.stat())
    except OSError:
        return ()


def _numbers(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns
