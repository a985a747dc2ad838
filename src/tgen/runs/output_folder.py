"""The directory of a run: its lock, checks before a run starts or resumes, and its removal.

A process takes the lock before it imports torch, so this module does not import it.
"""

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from tgen import distributed
from tgen.checkpoint.model_dir import files_of_a_model
from tgen.checkpoint.model_lookup import find_model, shipped_model
from tgen.checkpoint.stored_models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter
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
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", "choose a directory that does not exist yet")
    if not out.exists() and (problem := output_problem(out)):
        raise UsageError(f"--out {out}: {problem}", "choose another directory")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    has_model = bool({"config.json", "adapter_config.json"} & names)
    has_run = saved_state.has_run(out)
    if not names or (names == {"training"} and not has_run):
        return
    if not has_model and not has_run:
        raise UsageError(
            f"--out {out} contains other files", "choose a directory that does not exist yet"
        )
    if not overwrite:
        raise UsageError(
            f"{out} already contains a {'model' if has_model else 'run'}",
            "add --resume to continue it, --overwrite to replace it, or choose another --out",
        )


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


def check_removable(path: Path) -> None:
    """Raise UsageError unless a path is a GGUF file, damaged or not, or a directory with a model,
    an adapter or a run."""
    if path.is_symlink():
        raise UsageError(f"{path} is a link", "name the model that it leads to")
    if path.resolve() == shipped_model().resolve():
        raise UsageError(f"{path} is the model shipped with tgen", "choose another model")
    if path.is_file():
        is_model = path.suffix == ".gguf"
    else:
        is_model = _has_model(path) or _has_adapter(path) or saved_state.has_run(path)
    if not is_model:
        raise UsageError(
            f"{path} is not a model",
            "name a GGUF file, or a directory with config.json and model.safetensors",
        )


def remove_model(path: Path) -> list[str]:
    """Remove a model; return the names of other files in its directory, which stay.

    Nothing outside the directory changes; links in it are removed, not what they lead to. Raises
    UsageError as `check_removable`, and LockedError while a run trains the model.
    """
    check_removable(path)
    path = path.resolve()
    if path.is_file():
        files.remove(path)
        return []
    with ExitStack() as stack:
        stack.enter_context(lock_existing(path))
        own = set(files_of_a_model(path))
        if saved_state.has_run(path) and not saved_state.folder(path).is_symlink():
            own.add(saved_state.folder(path).name)
        others = sorted(entry.name for entry in path.iterdir() if entry.name not in own)
        if sys.platform == "win32":
            stack.close()  # Windows cannot rename a directory with an open file
        if not others:
            files.remove(path)
            return []
        main = ("config.json", ADAPTER_CONFIG)
        for name in sorted(own, key=lambda name: name not in main):  # then it is no model
            files.remove(path / name)
    return others


def _has_model(path: Path) -> bool:
    names = files_of_a_model(path) if path.is_dir() else []
    has_weights = any(name.startswith("model") and name.endswith(".safetensors") for name in names)
    return "config.json" in names and has_weights


def _has_adapter(path: Path) -> bool:
    return is_adapter(path) and (path / ADAPTER_WEIGHTS).is_file()
