"""A file that one process at a time may hold."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tgen import files
from tgen.errors import LockedError


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
        files.make_folder(path.parent)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            _try_lock(file)
        except OSError:
            with file:
                raise LockedError(
                    f"{path.parent} is in use by process {_holder(file)}",
                    "wait for that run to end, or choose another --out",
                ) from None
        with suppress(FileNotFoundError):  # who held it before may have removed it
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _try_lock(file: TextIO) -> None:
    if sys.platform == "win32":
        import msvcrt

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
