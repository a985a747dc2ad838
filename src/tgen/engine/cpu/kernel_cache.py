"""The kernels' object file: compiled once, stored in the user's cache directory, loaded in
milliseconds. Only compiling imports Numba; loading needs llvmlite alone.
"""

import ctypes
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from tgen.errors import TgenError
from tgen.storage import files

_NAME = "tgen_enter"
_DIGEST_BYTES = 32
_FILE_NAME = re.compile(r"[0-9a-f]{16}\.o")
MAX_FILES = 8  # object files of other versions and CPUs


def cache_path() -> Path | None:
    """The object file for this CPU; its name is a hash of everything that determines it.

    None if the user has no home directory.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    base = Path(home) if home else Path(os.path.expanduser("~")) / ".cache"
    if not base.is_absolute():
        return None
    target = [llvm.get_process_triple(), llvm.get_host_cpu_name()]
    target += [llvm.get_host_cpu_features().flatten(), llvmlite.__version__, _numba_version()]
    target += [os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]
    digest = hashlib.sha256(" ".join(target).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + files.read(source))
    return base / "tgen" / "kernels" / f"{digest.hexdigest()[:16]}.o"


def is_private(directory: Path) -> bool:
    """Whether only this user can write to the directory: its contents will be executed.

    Creates it if it is missing.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.lstat()
    except OSError:
        return False
    only_ours = state.st_uid == os.getuid() and not state.st_mode & 0o022
    return only_ours and stat.S_ISDIR(state.st_mode)


def read_kernels() -> bytes | None:
    """The stored machine code, or None if it is missing or damaged."""
    path = cache_path()
    if path is None or not is_private(path.parent):
        return None
    try:
        content = files.read(path)
    except (TgenError, OSError):
        return None
    with suppress(OSError):  # a read-only directory
        os.utime(path)  # the least recently used files are removed
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def store_kernels(code: bytes) -> None:
    """Store the machine code if possible, and remove the least recently used files."""
    path = cache_path()
    if path is None or not is_private(path.parent):
        return
    with suppress(OSError):  # a full disk: the next process compiles again
        files.publish(path, hashlib.sha256(code).digest() + code)
        others = (p for p in path.parent.iterdir() if _FILE_NAME.fullmatch(p.name) and p != path)
        for old in sorted(others, key=lambda p: -p.stat().st_mtime_ns)[MAX_FILES - 1 :]:
            old.unlink(missing_ok=True)


def kernels_cached() -> bool:
    """Whether the kernels were compiled before; otherwise the first use takes some seconds."""
    return read_kernels() is not None


_loading = threading.Lock()


def load_kernels() -> Callable[..., int]:
    """`entry.enter` as machine code, which runs without the GIL; compiled first if necessary."""
    with _loading:
        return _load_once()


@cache
def _load_once() -> Callable[..., int]:
    code = read_kernels()
    if code is None:
        # In another thread: during a call of LLVM, Ctrl-C would be ignored.
        compiled: Future[bytes] = Future()
        threading.Thread(target=_compile, args=(compiled,), daemon=True).start()
        code = compiled.result()
        store_kernels(code)
    return _link(code)


def _compile(result: "Future[bytes]") -> None:
    try:
        from tgen.engine.cpu.entry import machine_code

        result.set_result(machine_code(_NAME))
    except BaseException as error:
        result.set_exception(error)


def loaded_kernels() -> Callable[..., int] | None:
    """`load_kernels`, if this process has loaded them."""
    return _load_once() if _load_once.cache_info().currsize else None


def _numba_version() -> str:
    """The name of Numba's metadata directory: importlib.metadata would take 15 ms to import."""
    found = find_spec("numba")
    if found is None or found.origin is None:
        return ""
    return " ".join(sorted(p.name for p in Path(found.origin).parents[1].glob("numba-*.dist-info")))


def _link(code: bytes) -> Callable[..., int]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    linker.add_object_file(llvm.ObjectFileRef.from_data(code))
    linker.finalize_object()
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 8)
    function = kind(linker.get_function_address(_NAME))

    def enter(*arguments: int) -> int:
        result, error = ctypes.c_int64(), ctypes.c_void_p()
        function(ctypes.byref(result), ctypes.byref(error), *arguments)
        return result.value

    enter.__dict__["linker"] = linker  # it owns the machine code
    return enter
