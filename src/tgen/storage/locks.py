"""Lock files that one process at a time can hold.

`filelock` is unsuitable: some releases truncate the file on opening, which erases the holder's
process id; on Windows it locks a byte that readers of the id need; it never recreates lost
directories.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tgen.errors import LockedError
from tgen.storage import files

_OPEN_TRIES = 100
_LOCKED_BYTE = 1 << 30  # beyond the content, since Windows refuses to read a locked byte


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which contains the process id; the system frees it on exit.

    Raise LockedError, naming the holder's process id, if another process holds it.
    """
    with _open_locked(path) as file:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _open_locked(path: Path) -> TextIO:
    while True:
        file = _open(path)
        try:
            _lock_file(file)
        except (BlockingIOError, PermissionError):
            with file:
                raise LockedError(
                    f"{path.parent} is in use by process {_read_holder(file)}",
                    "wait for that run to end, or choose another --out",
                ) from None
        except OSError:
            file.close()
            raise
        with suppress(FileNotFoundError):  # the previous holder may have removed the file
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _open(path: Path) -> TextIO:
    for tries_left in reversed(range(_OPEN_TRIES)):
        try:
            files.make_folder(path.parent)
            return open(path, "a+", encoding="utf-8")
        except FileNotFoundError:  # another process failed to start and removed the directory
            if not tries_left:
                raise
    raise AssertionError


def _lock_file(file: TextIO) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)  # locking starts at the file position
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_holder(file: TextIO) -> str:
    for _ in range(100):  # the holder may not have written its id yet
        file.seek(0)
        if process_id := file.read(20).strip():
            return process_id
        time.sleep(0.01)
    return "unknown"
