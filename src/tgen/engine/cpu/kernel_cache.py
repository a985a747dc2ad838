"""The kernels: compiled once, kept in the user's folder for caches, loaded in milliseconds.

What is kept is machine code alone, which llvmlite places in memory; only compiling loads numba.
"""

import ctypes
import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from tgen.errors import TgenError
from tgen.storage import files

_NAME = "tgen_enter"
_DIGEST_BYTES = 32


def _path() -> Path:
    """Where the kernels for this processor are kept, under a name made from all that they are
    made from."""
    made_for = [llvm.get_process_triple(), llvm.get_host_cpu_name()]
    made_for += [llvm.get_host_cpu_features().flatten(), llvmlite.__version__]
    made_for += [os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]
    digest = hashlib.sha256(" ".join(made_for).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + files.read(source))
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    base = Path(home) if home else Path(os.path.expanduser("~")) / ".cache"
    return base / "tgen" / "kernels" / f"{digest.hexdigest()[:16]}.o"


def _is_ours(folder: Path) -> bool:
    """Whether the folder is this user's, and written by nobody else: what lies there is run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return False
    alone = state.st_uid == os.getuid() and not state.st_mode & 0o022
    return alone and stat.S_ISDIR(state.st_mode)


def _kept() -> bytes | None:
    """The machine code from an earlier time, if it is there and whole."""
    path = _path()
    try:
        content = files.read(path) if _is_ours(path.parent) else b""
    except TgenError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def kept() -> bool:
    """Whether the kernels need no compiling."""
    return _kept() is not None


@cache
def kernels() -> Callable[..., int]:
    """`entry.enter` in machine code, called without the interpreter's lock; compiled, in some
    seconds, if it is not kept."""
    code = _kept()
    if code is None:
        from tgen.engine.cpu.entry import machine_code

        code, path = machine_code(_NAME), _path()
        if _is_ours(path.parent):
            with suppress(OSError):  # a full disk: the next process compiles again
                files.publish(path, hashlib.sha256(code).digest() + code)
    return _placed(code)


def _placed(code: bytes) -> Callable[..., int]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    linker.add_object_file(llvm.ObjectFileRef.from_data(code))
    linker.finalize_object()
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 7)
    function = kind(linker.get_function_address(_NAME))

    def enter(*arguments: int) -> int:
        result, error = ctypes.c_int64(), ctypes.c_void_p()
        function(ctypes.byref(result), ctypes.byref(error), *arguments)
        return result.value

    enter.__dict__["memory"] = linker  # what it has placed lives as long as itself
    return enter
