"""The lock of a run's directory, which a process takes before it imports torch."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from tgen import distributed
from tgen.errors import LockedError
from tgen.runs.storage import state
from tgen.storage import files, locks


@contextmanager
def lock_run(out: Path) -> Iterator[None]:
    """Hold the lock of the run in `out` on rank 0; raise LockedError if another process has it.

    If no run exists at the end, remove all files created since.
    """
    if not distributed.is_rank_zero():
        yield
        return
    folder = state.folder(out)
    new_folders = list(takewhile(lambda path: not path.exists(), [folder, *folder.parents]))
    with ExitStack() as stack:
        with defer_signals():  # a signal before the callback is set would leave the lock behind
            stack.enter_context(locks.lock(_lock_path(out)))
            stack.callback(_clean_up, out, set(folder.iterdir()), new_folders)
        yield


@contextmanager
def lock_existing(out: Path) -> Iterator[None]:
    """Hold the lock of the run in `out`, which the block may remove; nothing without a run.

    Raises LockedError if another process has it.
    """
    if not state.folder(out).is_dir():
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.lock(_lock_path(out)))
        except LockedError as error:
            raise LockedError(error.message, "wait for that run to end, or stop it") from None
        yield


def has_lock(out: Path) -> bool:
    """Return whether `out` has a lock file, held by a process or left by one that ended."""
    return _lock_path(out).exists()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Run Python's signal handlers after the block instead of inside it.

    An exception raised during the import of a library may be dropped, or abort its C++ code.
    """
    numbers = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    installed = {number: signal.getsignal(number) for number in numbers if number is not None}
    handlers = {number: handler for number, handler in installed.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}  # only the main thread gets signals
    received: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received[:1]:
            signal.raise_signal(number)


def _clean_up(out: Path, old_files: set[Path], new_folders: Iterable[Path]) -> None:
    folder = state.folder(out)
    if not state.has_run(out):
        for path in set(folder.iterdir()) - old_files:
            files.remove(path)
        with suppress(OSError):  # other files are there, or Windows keeps an open file
            files.remove(_lock_path(out))
            for path in new_folders:
                path.rmdir()


def _lock_path(out: Path) -> Path:
    return state.folder(out) / "LOCK"
