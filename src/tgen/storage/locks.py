"""A file that one process at a time may hold."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tgen.errors import LockedError
from tgen.storage import files

_TRIES = 100
_FAR = 1 << 30  # bytes: past all that the file holds, for what is locked cannot be read on Windows


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Holds the lock file `path`; it falls free with the process, however that ends.

    Raises LockedError, naming the holder, if another process has it.
    """
    with _locked(path) as file:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _locked(path: Path) -> TextIO:
    while True:
        file = _opened(path)
        try:
            _try_lock(file)
        except (BlockingIOError, PermissionError):
            with file:
                raise LockedError(
                    f"{path.parent} is in use by process {_holder(file)}",
                    "wait for that run to end, or choose another --out",
                ) from None
        except OSError:
            file.close()
            raise
        with suppress(FileNotFoundError):  # who held it before may have removed it
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _opened(path: Path) -> TextIO:
    for tries_left in reversed(range(_TRIES)):
        try:
            files.make_folder(path.parent)
            return open(path, "a+", encoding="utf-8")
        except FileNotFoundError:  # another start has failed, and taken the folder with it
            if not tries_left:
                raise
    raise AssertionError


def _try_lock(file: TextIO) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file.fileno(), _FAR, os.SEEK_SET)  # it locks from where the file stands
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(file: TextIO) -> str:
    for _ in range(100):  # it may have locked, and not yet said who it is
        file.seek(0)
        if found := file.read(20).strip():
            return found
        time.sleep(0.01)
    return "unknown"
