"""Load a command's model, and report slow steps."""

from pathlib import Path
from typing import TYPE_CHECKING

from tgen.cli import console
from tgen.config import CacheDtype, StoredAs

if TYPE_CHECKING:
    from tgen.loaded_model import LoadedModel


def find_paths(model: str | None, adapter: str | None) -> tuple[Path, Path | None]:
    """Return the paths of a model and of its adapter; an adapter alone is a model's path, too."""
    from tgen.checkpoint.adapter import find_adapter
    from tgen.checkpoint.model_lookup import find_model

    if adapter is None:
        return find_model(model).path, None
    path = find_adapter(adapter)
    return (path, None) if model is None else (find_model(model).path, path)


def ensure_kernels_compiled(device: str, *, quiet: bool) -> None:
    """Compile the CPU kernels if the device uses them and they are not cached."""
    from tgen.engine.open_engine import uses_kernels

    if not uses_kernels(device):
        return
    from tgen.engine.cpu.kernel_cache import kernels_cached, load_kernels

    if not kernels_cached():
        message = "compiling kernels for this CPU (only once, about 30 seconds)"
        console.print_status(message, quiet=quiet)
        load_kernels()
        if not kernels_cached():
            message = (
                "warning: no writable cache directory: kernels are recompiled at every start "
                "(set XDG_CACHE_HOME to a directory that only you can write to)"
            )
            console.print_status(message, quiet=quiet)


def load_model(
    path: Path,
    *,
    adapter: Path | None = None,
    device: str,
    threads: int | None,
    dtype: StoredAs | None,
    cache_dtype: CacheDtype | None = None,
    quiet: bool,
) -> "LoadedModel":
    """Load a model from its path, with an adapter merged into it if one is named."""
    from tgen.engine.open_engine import missing_kernels, runs_on_cpu
    from tgen.loaded_model import open_model

    reason = missing_kernels() if runs_on_cpu(device) else None
    if reason:
        message = f"warning: using torch, which is slower than the compiled kernels: {reason}"
        console.print_status(message, quiet=quiet)
    ensure_kernels_compiled(device, quiet=quiet)
    model = open_model(
        path,
        adapter=adapter,
        device=device,
        threads=threads,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    warnings = list(model.bundle.warnings)
    if model.bundle.quantized and dtype is None and model.engine.dtype == "float32":
        warnings.append(
            "the quantized weights are stored as float32: int8 and int4 need the kernels"
        )
    for warning in warnings:
        console.print_status(f"warning: {warning}", quiet=quiet)
    return model
