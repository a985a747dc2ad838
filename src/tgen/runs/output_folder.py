"""The directory of a run: its lock, and checks before a run starts or resumes.

A process takes the lock before it imports torch, so this module does not import it.
"""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from tgen import distributed
from tgen.checkpoint.model_lookup import find_model
from tgen.checkpoint.stored_models import is_adapter
from tgen.config.training import Parallel
from tgen.errors import LockedError, TgenError, TrainingError, UsageError
from tgen.lora import adapter as adapters
from tgen.runs import saved_state
from tgen.runs.request import RunRequest
from tgen.storage import files, locks
from tgen.storage.files import output_problem


@contextmanager
def lock_run(out: Path) -> Iterator[None]:
    """Hold the lock of the run in `out` on rank 0; raise LockedError if another process has it.

    If no run exists at the end, remove all files created since.
    """
    if not distributed.is_rank_zero():
        yield
        return
    folder = saved_state.folder(out)
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
    if not saved_state.folder(out).is_dir():
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
    folder = saved_state.folder(out)
    if not saved_state.has_run(out):
        for path in set(folder.iterdir()) - old_files:
            files.remove(path)
        with suppress(OSError):  # other files are there, or Windows keeps an open file
            files.remove(_lock_path(out))
            for path in new_folders:
                path.rmdir()


def _lock_path(out: Path) -> Path:
    return saved_state.folder(out) / "LOCK"


def check_out_is_not_source(request: RunRequest) -> None:
    """Raise UsageError if a new run would replace a model or an adapter that it starts from."""
    out = request.out
    if any(path.exists() and out.exists() and out.samefile(path) for path in _sources(request)):
        raise UsageError(
            f"--out {out} cannot be replaced: this run starts from it", "choose another --out"
        )


def _sources(request: RunRequest) -> Iterator[Path]:
    """Yield the paths of --from and --adapter, and of their base models."""
    for name in (request.start_from, request.adapter):
        if name is not None:
            with suppress(TgenError):  # errors are raised when the model is opened
                path = find_model(str(name)).path
                yield path
                if is_adapter(path):
                    yield adapters.find_base(path)


def check_out_is_free(out: Path, *, overwrite: bool) -> None:
    """Raise UsageError if a new run in `out` would replace anything without `overwrite`."""
    from tgen.checkpoint.model_dir import is_whole  # slow: --help needs no tokenizers

    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", "choose a directory that does not exist yet")
    if not out.exists() and (problem := output_problem(out)):
        raise UsageError(f"--out {out}: {problem}", "choose another directory")
    has_model, has_run = out.exists() and is_whole(out), saved_state.has_run(out)
    if not has_model and not has_run:
        if _has_only_a_start(out):
            return
        raise UsageError(
            f"--out {out} contains other files", "choose a directory that does not exist yet"
        )
    if not overwrite:
        raise UsageError(
            f"{out} already contains a {'model' if has_model else 'run'}",
            "add --resume to continue it, --overwrite to replace it, or choose another --out",
        )


def _has_only_a_start(out: Path) -> bool:
    """Return whether `out` has at most what a start leaves that was killed before run.json: the
    lock and, only beside it, files of a run. Other programs have a `training` directory, too."""
    folder = saved_state.folder(out)
    inside = _names(folder)
    is_started = "LOCK" in inside and all(map(saved_state.is_of_a_start, inside - {"LOCK"}))
    return _names(out) <= {folder.name} and (not inside or is_started)


def _names(directory: Path) -> set[str]:
    """The names in a directory, without temporary ones; none if it does not exist."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return {path.name for path in paths if not path.name.startswith(files.TEMPORARY)}


def check_run_exists(out: Path) -> None:
    """Raise TrainingError unless `out` has a run to resume."""
    if not saved_state.has_run(out):
        raise TrainingError(f"{out} contains no run to resume", "remove --resume to start one")


def check_parallel(requested: Parallel | None) -> None:
    """Raise UsageError if --parallel is requested without torchrun."""
    if requested and not distributed.launched():
        raise UsageError(
            f"--parallel {requested} needs several processes",
            f"run: torchrun --nproc-per-node N -m tgen train --parallel {requested} ...",
        )
