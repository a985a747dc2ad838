"""Compiling ahead, and keeping what was compiled where a changed source finds nothing old.

Numba notices a change in the file of the function that it has kept, but not in those that the
function calls. So the folder has a name made from all of them.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite.binding import get_host_cpu_name

from tgen import files

_N_COMPILED = 3  # functions: `forward`, and two of `threads`


@cache
def _folder() -> Path:
    """Where the kernels for this processor are kept, in the user's folder for caches."""
    made_by = [numba.__version__, llvmlite.__version__, get_host_cpu_name()]
    digest = hashlib.sha256(" ".join(made_by).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + files.read(source))
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    base = Path(home) if home else Path(os.path.expanduser("~")) / ".cache"
    return base / "tgen" / f"kernels-{digest.hexdigest()[:16]}"


@cache
def _is_ours() -> bool:
    """Whether the folder can be written, by this user alone: what lies there is run."""
    folder = _folder()
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for place in (folder.parent, folder):  # their mode is not what the umask makes of it
            place.mkdir(mode=0o700, exist_ok=True)
        above = folder.parent.stat()
        if above.st_uid == os.getuid() and above.st_mode & 0o022:  # as an earlier tgen left it
            folder.parent.chmod(above.st_mode & ~0o022)
        states = [place.stat() for place in (folder, folder.parent)]
        with tempfile.TemporaryFile(dir=folder):
            return all(s.st_uid == os.getuid() and not s.st_mode & 0o022 for s in states)
    except OSError:
        return False


def kept() -> bool:
    """Whether the kernels need no compiling: they are there from an earlier time."""
    return _is_ours() and len(list(_folder().glob("**/*.nbi"))) >= _N_COMPILED


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """A function in machine code, without the interpreter's lock, kept for the next process where
    the disk allows it."""

    def compile_now(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_folder())
        try:
            if _is_ours():  # else Numba would keep it elsewhere, under the source's name
                return numba.njit(signature, cache=True, **options)(function)
        except Exception:  # what was kept is damaged
            pass
        finally:
            numba.config.CACHE_DIR = before
        return numba.njit(signature, **options)(function)

    return compile_now
