"""Who owns a run's directory: one process, from before the work begins to its end."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from tgen import distributed
from tgen.config import Parallel
from tgen.errors import TrainingError, UsageError
from tgen.runs.storage import state
from tgen.storage import files, locks


@contextmanager
def run_lock(out: Path) -> Iterator[None]:
    """Holds the run's lock, which is rank 0's; where no run has begun in the end, leaves what was
    there before.

    Raises LockedError if another process has it.
    """
    if not distributed.is_rank_zero():
        yield
        return
    folder = state.folder(out)
    new = list(takewhile(lambda path: not path.exists(), [folder, *folder.parents]))
    with ExitStack() as stack:
        with (
            defer_signals()
        ):  # a signal between the lock and the promise to remove it would leave it
            stack.enter_context(locks.lock(_lock(out)))
            stack.callback(_clear, out, set(folder.iterdir()), new)
        yield


def _clear(out: Path, before: set[Path], new: Iterable[Path]) -> None:
    """Removes what a run that has not begun has put beside what was there, and folders for it."""
    folder = state.folder(out)
    if not (folder / "run.json").exists():
        for path in set(folder.iterdir()) - before:
            files.remove(path)
        with suppress(OSError):  # other files are there; or Windows keeps what is open
            files.remove(_lock(out))
            for path in new:
                path.rmdir()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Whatever Python does about signals, it does after the block: an exception that comes amid the
    import of a library may be dropped, or end in its C++ as an abort."""
    numbers = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    found = {number: signal.getsignal(number) for number in numbers if number is not None}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}  # the main one has them all
    came: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def may_be_owned(out: Path) -> bool:
    """Whether a process works there, or has."""
    return _lock(out).exists()


def check_free(out: Path, *, overwrite: bool) -> None:
    """Raises UsageError unless a run may begin there: nothing is lost that was not asked for."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", "give a directory that does not exist yet")
    entries = {entry.name for entry in out.iterdir()} if out.exists() else set()
    begun = state.folder(out) / "run.json"
    if not entries or (entries == {"training"} and not begun.exists()):
        return
    if "config.json" not in entries and not begun.exists():
        raise UsageError(
            f"--out {out} holds other files", "give a directory that does not exist yet"
        )
    if not overwrite:
        raise UsageError(
            f"{out} already holds a {'model' if 'config.json' in entries else 'run'}",
            "add --resume to go on with it, --overwrite to start anew, or --out for another place",
        )


def check_launched(wanted: Parallel | None) -> None:
    """Raises UsageError where a way to share a model is `wanted`, and nobody to share it with."""
    if wanted and not distributed.launched():
        raise UsageError(
            f"--parallel {wanted} with one process",
            f"torchrun --nproc-per-node N -m tgen train --parallel {wanted} ... starts N",
        )


def check_begun(out: Path) -> None:
    """Raises TrainingError unless there is a run to go on with."""
    if not (state.folder(out) / "run.json").exists():
        raise TrainingError(f"there is no run in {out} to resume", "train without --resume first")


def _lock(out: Path) -> Path:
    return state.folder(out) / "LOCK"
