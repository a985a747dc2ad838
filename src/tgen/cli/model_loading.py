"""Opening the model that a command works on, and saying what takes long about it."""

from pathlib import Path
from typing import TYPE_CHECKING

from tgen.cli import console
from tgen.config import StoredAs

if TYPE_CHECKING:
    from tgen.api import Model


def ensure_kernels_compiled(device: str, *, quiet: bool) -> None:
    """Makes the kernels that will compute on this processor, if they are not there."""
    from tgen.engine import compile_kernels, kernels_cached, uses_kernels

    if uses_kernels(device) and not kernels_cached():
        console.print_status("compiling for this processor, once: about ten seconds", quiet=quiet)
        compile_kernels()
        if not kernels_cached():
            console.print_status(
                "no folder for caches is ours to write: so at every start", quiet=quiet
            )


def load_model(
    path: Path, *, device: str, threads: int | None, weights: StoredAs | None, quiet: bool
) -> "Model":
    """The model at a path that was found."""
    from tgen.api import load
    from tgen.engine import missing_kernels, on_processor

    missing = missing_kernels() if on_processor(device) else None
    if missing:
        console.print_status(
            f"torch computes, more slowly than compiled kernels: {missing}", quiet=quiet
        )
    ensure_kernels_compiled(device, quiet=quiet)
    return load(path, device=device, threads=threads, weights=weights)
