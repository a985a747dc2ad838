"""Load a command's model, and report slow steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tgen import distributed
from tgen.cli import console
from tgen.cli.phase_times import end_phase
from tgen.config import EngineOptions
from tgen.distributed import Ranks
from tgen.errors import ModelError

if TYPE_CHECKING:
    from tgen.loaded_model import LoadedModel


def find_paths(model: str | None, adapter: str | None) -> tuple[Path, Path | None]:
    """Return the paths of a model and of its adapter; an adapter alone is a model's path, too."""
    from tgen.checkpoint.model_lookup import CHECKPOINT, find_model

    if adapter is None:
        path, found_by = find_model(model)
        if found_by == CHECKPOINT:
            console.print_status(f"note: {model} has only checkpoints: using {path}, the newest")
        return path, None
    from tgen.lora.adapter import find_adapter  # which takes milliseconds to import

    path = find_adapter(adapter)
    return (path, None) if model is None else (find_model(model).path, path)


@contextmanager
def _draft_model_in_errors() -> Iterator[None]:
    """Name the option in the errors of the model that drafts."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"--draft-model: {error.message}", error.hint) from None


def find_draft_model(name: str | None) -> Path | None:
    """Return the path of the model that `--draft-model` names."""
    with _draft_model_in_errors():
        return None if name is None else find_paths(name, None)[0]


def load_draft_model(path: Path, options: EngineOptions) -> "LoadedModel":
    """Load the model that `--draft-model` names."""
    with _draft_model_in_errors():
        return load_model(path, options)


def short_name(model: str | None, path: Path) -> str:
    """Return the name of a model without directories and suffix."""
    # A cached model's own directory has a hash for a name.
    last = Path(model).name if model else ""
    return (last or path.resolve().name).removesuffix(".gguf")


def announce_compiling() -> None:
    """Print a line when kernels have to be compiled."""
    from tgen.engine.cpu import kernel_cache

    kernel_cache.notify = console.print_status


def load_model(path: Path, options: EngineOptions, *, adapter: Path | None = None) -> "LoadedModel":
    """Load a model from its path, with an adapter merged into it if one is named."""
    from tgen.engine.choose_engine import missing_kernels, runs_on_cpu
    from tgen.loaded_model import open_model

    reason = missing_kernels() if runs_on_cpu(options.device) else None
    if reason:
        message = f"warning: using torch, which is slower than the compiled kernels: {reason}"
        console.print_status(message)
    announce_compiling()
    end_phase("import")
    model = open_model(path, options, adapter=adapter)
    end_phase("load")
    warnings = list(model.bundle.warnings)
    if model.bundle.quantized and options.dtype is None and model.engine.dtype == "float32":
        warnings.append(
            "the quantized weights are stored as float32: int8 and int4 need the kernels"
        )
    for warning in warnings:
        console.print_status(f"warning: {warning}")
    return model


def load_shared(
    path: Path, options: EngineOptions, ranks: Ranks, *, adapter: Path | None
) -> "LoadedModel":
    """Load the model, the same on all ranks; ranks of one machine share its CPU cores."""
    from tgen.checkpoint.model_dir import digest
    from tgen.machine.cpus import default_threads

    if ranks.world_size > 1 and options.threads is None:
        options = replace(options, threads=default_threads(shared_by=ranks.local_world_size))
    model = load_model(path, options, adapter=adapter)
    if ranks.world_size > 1:
        distributed.assert_same(f"the model {path}", digest(model.bundle)[:16])
    return model
