"""Compiling ahead, and keeping what was compiled where a changed source finds nothing old.

Numba notices a change in the file of the function that it has kept, but not in those that the
function calls. So the folder has a name made from all of them.
"""

import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba

from tgen import __version__


def _folder() -> Path:
    """Where this machine's kernels are kept: TGEN_CACHE, or the user's folder for caches."""
    digest = hashlib.sha256(f"{__version__} {numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    base = Path(home) if home else Path.home() / ".cache"
    return base / "tgen" / f"kernels-{platform.machine()}-{digest.hexdigest()[:16]}"


def kept() -> bool:
    """Whether the kernels need no compiling: they are there from an earlier time."""
    return any(_folder().glob("**/*.nbi"))


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """A function in machine code, without the interpreter's lock, kept for the next process where
    the disk allows it."""

    def compile_now(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_folder())
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except (RuntimeError, OSError):  # no folder can be written
            return numba.njit(signature, **options)(function)
        finally:
            numba.config.CACHE_DIR = before

    return compile_now
