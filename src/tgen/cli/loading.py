"""Opening the model that a command works on, and saying what takes long about it."""

from pathlib import Path
from typing import TYPE_CHECKING

from tgen.cli import console
from tgen.config import Weights

if TYPE_CHECKING:
    from tgen.api import Model


def load_model(
    name: str | None, *, device: str, threads: int | None, weights: Weights, quiet: bool
) -> tuple[Path, "Model"]:
    """The named model, or the newest, and where it was found."""
    from tgen.api import find_model, load
    from tgen.engine import kernels_are_kept, missing_kernels, uses_kernels

    path = find_model(name)
    missing = missing_kernels()
    if uses_kernels(device) and not kernels_are_kept():
        console.note("compiling for this processor, once: about ten seconds", quiet=quiet)
    elif missing and device in ("auto", "cpu"):
        console.note(f"torch computes, more slowly than compiled kernels: {missing}", quiet=quiet)
    return path, load(path, device=device, threads=threads, weights=weights)
