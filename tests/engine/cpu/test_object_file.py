"""Machine code placed by tgen and by LLVM's linker gives the same results."""

import ctypes
import math
import platform
import subprocess
import sys

import numpy as np
import pytest
from llvmlite import ir

from tgen.engine.cpu import object_file
from tgen.engine.cpu.compiler import compiled, machine_code
from tgen.engine.cpu.intrinsics import load_float, store_float

is_elf = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = pytest.mark.skipif(not is_elf, reason="needs Linux on x86-64")


@compiled
def _apply(x, n, factor):
    """Constants, calls within the file, and calls of the C library."""
    for i in range(n):
        store_float(x, i, _scaled_erf(load_float(x, i), factor))
    return n * 7


@compiled(result=ir.FloatType())
def _scaled_erf(x, factor):
    return np.float32(1.25) * math.erf(x) * np.float32(0.1) + np.float32(factor)


def run(address: int) -> tuple[int, np.ndarray]:
    x = np.linspace(-2, 2, 50, dtype=np.float32)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(address)(x.ctypes.data, 50, 3), x


def test_both_linkers_give_the_same_results(monkeypatch):
    code = machine_code(_apply, "function", {})
    expected, y = run(object_file._place_with_llvm(code, "function"))
    monkeypatch.setattr(object_file, "_place_with_llvm", None)
    result, x = run(object_file.place(code, "function"))
    assert result == expected == 350
    assert x.tobytes() == y.tobytes()
    assert np.allclose(x, [0.125 * math.erf(v) + 3 for v in np.linspace(-2, 2, 50)])


@pytest.mark.parametrize("change", ["relocation", "writable", "name", "format"])
def test_file_that_needs_more_is_left_to_llvm(change, monkeypatch):
    code = machine_code(_apply, "function", {})
    if change == "relocation":
        monkeypatch.setattr(object_file, "_ABSOLUTE_ADDRESS", 2)
    elif change == "writable":
        monkeypatch.setattr(object_file, "_WRITABLE", 4)  # the flag of machine code
    elif change == "name":
        code = code.replace(b"erff", b"erfz")
    else:
        code = b"\xcf\xfa\xed\xfe" + code[4:]
    monkeypatch.setattr(object_file, "_place_with_llvm", lambda *_: 350)
    assert object_file.place(code, "function") == 350


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("ctypes.CDLL(None).prctl(65, 1, 0, 0, 0)", "not allow machine code"),  # PR_SET_MDWE
        ("resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))", "MemoryError"),
    ],
)
def test_refusal_by_the_system_is_an_error(before, reason):
    code = f"""
import ctypes, resource
from tgen.engine.cpu import kernel_cache, object_file
code = kernel_cache.read_object(None)
assert code
refused = {before}
if refused:
    print("not allow machine code")  # an older kernel than 6.3
else:
    try:
        object_file.place(code + bytes(1 << 21), kernel_cache.NAME)
    except MemoryError:
        print("MemoryError")
    except Exception as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert reason in result.stdout.decode()
