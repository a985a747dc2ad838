"""Checks before a run starts or resumes: its directory, its ranks. Without torch."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tgen import distributed
from tgen.checkpoint.model_lookup import find_model
from tgen.checkpoint.stored_models import is_adapter
from tgen.config.training import Parallel
from tgen.errors import TgenError, TrainingError, UsageError
from tgen.lora import adapter as adapters
from tgen.runs.request import RunRequest
from tgen.runs.storage import state
from tgen.storage.files import output_problem


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
    has_run = state.has_run(out)
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
    if not state.has_run(out):
        raise TrainingError(f"{out} contains no run to resume", "remove --resume to start one")


def check_parallel(requested: Parallel | None) -> None:
    """Raise UsageError if --parallel is requested without torchrun."""
    if requested and not distributed.launched():
        raise UsageError(
            f"--parallel {requested} needs several processes",
            f"run: torchrun --nproc-per-node N -m tgen train --parallel {requested} ...",
        )
