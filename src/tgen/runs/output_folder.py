"""The directory of a run: its default name, its lock, and checks before a run starts or resumes.

A process takes the lock before it imports torch, so this module does not import it.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from tgen import distributed
from tgen.checkpoint import model_card
from tgen.checkpoint.model_files import NEEDED_FILES
from tgen.checkpoint.model_lookup import find_model
from tgen.checkpoint.stored_models import ADAPTER_CONFIG, ADAPTER_FILES, is_adapter
from tgen.config.training import Parallel
from tgen.errors import LockedError, TgenError, TrainingError, UsageError
from tgen.lora import adapter_base
from tgen.runs import saved_state
from tgen.runs.request import RunRequest
from tgen.runs.uninterrupted import defer_signals
from tgen.storage import files, locks
from tgen.storage.files import output_problem


def default_output(corpus: list[str]) -> Path:
    """Return models/<name of the corpus>. Raises UsageError without a corpus."""
    if not corpus:
        hint = "name a text file, or - for stdin; with --resume, pass --out"
        raise UsageError("no corpus", hint)
    piped = corpus[0] == "-" or files.is_pipe(corpus[0])
    return Path("models") / ("stdin" if piped else default_name(corpus[0]))


def default_name(corpus: str) -> str:
    """Return the name of a directory for results of a corpus."""
    path = Path(corpus)
    is_pattern = any(mark in corpus for mark in "*?[") and not path.exists()
    name = "corpus" if is_pattern else (path.stem or path.resolve().name)
    return name.lstrip(".") or "corpus"


def lacks_model(out: Path, *, has_adapter: bool) -> bool:
    """Return whether files of the model, or of the adapter, that a run wrote are gone."""
    needed = ADAPTER_FILES if has_adapter else NEEDED_FILES
    return any(not (out / name).exists() for name in needed)


@contextmanager
def lock_run(out: Path) -> Iterator[None]:
    """Hold the lock of the run in `out` on rank 0; raise LockedError if another process has it.

    `out` has a run or a start, or nothing in its directory. If no run exists at the end, remove
    all files of a run created since.
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
    if not _is_run_or_start(out):
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.lock(_lock_path(out)))
        except LockedError as error:
            raise LockedError(error.message, "wait for that run to end, or stop it") from None
        yield


def has_lock(out: Path) -> bool:
    """Return whether `out` has a run's lock file, held by a process or left by one that ended."""
    return _is_run_or_start(out) and _lock_path(out).exists()


def _clean_up(out: Path, old_files: set[Path], new_folders: Iterable[Path]) -> None:
    folder = saved_state.folder(out)
    if folder.exists() and not saved_state.has_run(out):
        for path in set(folder.iterdir()) - old_files:
            if saved_state.is_name_of_run(path.name):
                files.remove(path)
        saved_state.remove_leftovers(out)
        with suppress(OSError):  # other files are there, or Windows keeps an open file
            files.remove(_lock_path(out))
            for path in new_folders:
                path.rmdir()


def _lock_path(out: Path) -> Path:
    return saved_state.folder(out) / saved_state.LOCK


def check_out_is_not_source(request: RunRequest) -> None:
    """Raise UsageError if a new run would replace a model or an adapter that it starts from."""
    out = request.out
    if any(path.exists() and out.exists() and out.samefile(path) for path in _sources(request)):
        raise UsageError(
            f"--out {out} cannot be replaced: this run starts from it", "choose another --out"
        )


def _sources(request: RunRequest) -> Iterator[Path]:
    """Yield the paths of --from-run, --from and --adapter, and of the base models."""
    if request.from_run is not None:
        yield request.from_run
    for name in (request.start_from, request.adapter):
        if name is not None:
            with suppress(TgenError):  # errors are raised when the model is opened
                path = find_model(str(name)).path
                yield path
                if is_adapter(path):
                    yield adapter_base.find_base(path)


def check_out_is_free(out: Path, *, overwrite: bool) -> None:
    """Raise UsageError if a new run in `out` would replace anything without `overwrite`."""
    from tgen.checkpoint.model_files import files_of_a_model, is_whole  # slow: tokenizers

    if out.is_symlink() and not out.exists():
        raise UsageError(
            f"--out {out} is a broken link", "remove the link, or choose another --out"
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", "choose a directory that does not exist yet")
    problem = "" if out.exists() else output_problem(out)
    if problem and not out.is_dir():  # another start may have made it since
        raise UsageError(f"--out {out}: {problem}", "choose another directory")
    has_model, has_run = out.exists() and is_whole(out), saved_state.is_run(out)
    names, inside = saved_state.file_names(out), saved_state.file_names(saved_state.folder(out))
    others = (
        {"config.json", ADAPTER_CONFIG} & names
        if has_run
        else names - {saved_state.folder(out).name}
    )
    if has_model or (has_run and files_of_a_model(out)):
        others = set()
    if inside and not has_run and not saved_state.is_start(out):
        others.add(saved_state.folder(out).name)
    if others:
        raise UsageError(
            f"--out {out} contains other files: {', '.join(sorted(others)[:5])}",
            "choose a directory that does not exist yet",
        )
    if not overwrite and (has_model or has_run):
        raise UsageError(
            f"{out} already contains a {'model' if has_model else 'run'}",
            "add --resume to continue it, --overwrite to replace it, or choose another --out",
        )


def own_files(directory: Path) -> set[str]:
    """Return the names in a directory that are those of a model or a run, as a corpus skips them;
    in the `training` directory of a run, all."""
    from tgen.checkpoint.model_files import files_to_load  # slow: tokenizers

    names, absolute = set(files_to_load(directory)), directory.absolute()
    if names and model_card.is_unedited(directory):
        names.add(model_card.FILE_NAME)
    training = saved_state.folder(directory).name
    if _is_run_or_start(directory):
        names.add(training)
    if absolute.name == training and _is_run_or_start(absolute.parent):
        names |= saved_state.file_names(absolute)
    return names


def _is_run_or_start(out: Path) -> bool:
    return saved_state.is_run(out) or saved_state.is_start(out)


def check_run_exists(out: Path) -> None:
    """Raise TrainingError unless `out` has a run to resume."""
    if not saved_state.has_run(out):
        if any(saved_state.folder(out).glob("state-*")):
            path, hint = saved_state.folder(out) / "run.json", saved_state.recovery_hint(out)
            raise TrainingError(f"{path} is missing", hint)
        raise TrainingError(f"{out} contains no run to resume", "remove --resume to start one")
    saved_state.load_record(out)  # a lock would change the directory of another program


def is_restarted(out: Path) -> bool:
    """Return whether the run in `out` was started by ranks that torchrun has restarted since; rank
    0 decides."""
    is_own = False
    if distributed.is_rank_zero() and saved_state.is_run(out):
        is_own = distributed.has_mark(saved_state.load_record(out)[0]["run_id"])
    return bool(distributed.broadcast(is_own))


def check_parallel(requested: Parallel | None) -> None:
    """Raise TgenError if ranks cannot share the model as requested; all ranks must call this."""
    if requested and not distributed.launched():
        raise UsageError(
            f"--parallel {requested} needs several processes",
            f"run: torchrun --nproc-per-node N -m tgen train --parallel {requested} ...",
        )
    if requested == "hsdp":
        _, n_ranks, _, n_local = distributed.ranks()
        distributed.assert_same("the number of ranks per machine", str(n_local))
        if not 1 < n_local < n_ranks:
            raise UsageError(
                "--parallel hsdp needs several machines with several ranks each "
                f"(got {n_ranks} ranks, {n_local} per machine)",
                "use --parallel fsdp",
            )
