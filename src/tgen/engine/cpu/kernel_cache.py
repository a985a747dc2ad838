"""The kernels' object files: compiled once, stored in the user's cache directory, loaded in
milliseconds. There is one for `entry.enter`, and one for `forward.forward` with each dtype of
inputs and of the KV cache that a model has needed so far.
"""

import ctypes
import hashlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tgen.engine.cpu import target
from tgen.engine.cpu.job_layout import BFLOAT16, FLOAT16, FLOAT32, INT8
from tgen.engine.cpu.object_file import place
from tgen.errors import TgenError
from tgen.storage import files
from tgen.storage.user_cache import cache_folder, is_own, is_private

Dtypes = tuple[int, int]  # of the inputs of products, and of the KV cache
DEFAULTS: list[Dtypes] = [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT16), (INT8, FLOAT16)]
NAME = "tgen_kernel"  # of the function in each file
_DIGEST_BYTES = 32
_FILE_NAME = re.compile(r"[0-9a-f]{16}-[a-z0-9-]+\.o")
MAX_FILES = 64  # of 50 KB each, of all versions and CPUs


@cache
def _digest(description: str) -> str:
    """A hash of everything that determines the machine code besides the dtypes."""
    digest = hashlib.sha256(description.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + files.read(source))
    return digest.hexdigest()[:16]


def object_path(dtypes: Dtypes | None) -> Path | None:
    """The object file of `forward` for these dtypes, or of `enter`."""
    folder = cache_folder("kernels")
    name = "enter" if dtypes is None else f"forward-{dtypes[0]}-{dtypes[1]}"
    digest = _digest(target.description())
    return folder and folder / f"{digest}-{name}.o"


def read_object(dtypes: Dtypes | None) -> bytes | None:
    """The stored machine code, or None if it is missing or damaged."""
    path = object_path(dtypes)
    if path is None or not is_private(path.parent):
        return None
    try:
        content = files.read(path) if is_own(path) else b""
    except (TgenError, OSError):
        return None
    with suppress(OSError):  # a read-only directory
        os.utime(path)  # the least recently used files are removed
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def store_object(dtypes: Dtypes | None, code: bytes) -> None:
    """Store the machine code if possible, and remove the least recently used files."""
    path = object_path(dtypes)
    if path is None or not is_private(path.parent):
        return
    with suppress(OSError):  # a full disk: the next process compiles again
        files.publish(path, hashlib.sha256(code).digest() + code, mode=0o600)
        others = (p for p in path.parent.iterdir() if _FILE_NAME.fullmatch(p.name) and p != path)
        for old in sorted(others, key=lambda p: -p.stat().st_mtime_ns)[MAX_FILES - 1 :]:
            old.unlink(missing_ok=True)


notify: Callable[[str], None] | None = None  # callback for slow steps and warnings
_loading = threading.Lock()
_loaded: dict[Dtypes | None, int] = {}  # addresses of functions


def load_kernels(*dtypes: Dtypes) -> None:
    """Load the machine code for these dtypes; compile it if needed."""
    _load([None, *dtypes])


def enter_function() -> Callable[..., int]:
    """`entry.enter`, which runs without the GIL; compiled if needed."""
    _load([None])
    return _enter()


def forward_address(dtypes: Dtypes) -> int:
    """The address of `forward.forward` for these dtypes; compiled if needed."""
    _load([dtypes])
    return _loaded[dtypes]


def loaded_enter() -> Callable[..., int] | None:
    """`enter_function`, if this process has loaded it."""
    return _enter() if None in _loaded else None


@cache
def _enter() -> Callable[..., int]:
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 8)
    return kind(_loaded[None])


def _load(parts: Sequence[Dtypes | None]) -> None:
    if all(part in _loaded for part in parts):
        return
    with _loading:
        codes = {part: read_object(part) for part in parts if part not in _loaded}
        missing = [part for part, code in codes.items() if code is None]
        if missing and notify:
            notify("compiling kernels for this CPU (once; a few seconds)")
        codes |= _compile(missing)
        if notify and any(read_object(part) is None for part in missing):
            notify(
                "warning: no writable cache directory: kernels are recompiled at every start "
                "(set XDG_CACHE_HOME to a directory that only you can write to)"
            )
        _loaded.update({part: place(code, NAME) for part, code in codes.items() if code})


def _check_llvmlite() -> None:
    try:
        import llvmlite.binding  # noqa: F401
    except (ImportError, OSError) as error:
        hint = "set TGEN_KERNELS=0 to compute with torch"
        raise TgenError(f"llvmlite cannot be imported: {error}", hint) from None


def _compile(parts: Sequence[Dtypes | None]) -> dict[Dtypes | None, bytes]:
    """Compile and store parts, each in a thread: during a call of LLVM, this one would ignore
    Ctrl-C."""
    codes: dict[Dtypes | None, bytes] = {}
    errors: list[BaseException] = []

    def compile_one(dtypes: Dtypes | None) -> None:
        try:
            _check_llvmlite()
            from tgen.engine.cpu.compiler import machine_code
            from tgen.engine.cpu.entry import enter
            from tgen.engine.cpu.forward import forward
            from tgen.engine.cpu.kernels import CACHE, INPUTS

            if dtypes is None:
                codes[None] = machine_code(enter, NAME, {})
            else:
                parameters = dict(zip((INPUTS, CACHE), dtypes, strict=True))
                codes[dtypes] = machine_code(forward, NAME, parameters)
            store_object(dtypes, codes[dtypes])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=compile_one, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return codes
