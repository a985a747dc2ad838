"""Machine code placed by tgen and by LLVM's linker gives the same results."""

import ctypes
import math
import platform

import numpy as np
import pytest
from llvmlite import ir

from tgen.engine.cpu import object_file
from tgen.engine.cpu.compiler import compiled, machine_code
from tgen.engine.cpu.intrinsics import load_float, store_float

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")


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


def test_both_linkers_give_the_same_results():
    code = machine_code(_apply, "function", {})
    address = object_file._place_elf(code, "function")
    assert address
    (result, x), (expected, y) = run(address), run(object_file._place_with_llvm(code, "function"))
    assert result == expected == 350
    assert x.tobytes() == y.tobytes()
    assert np.allclose(x, [0.125 * math.erf(v) + 3 for v in np.linspace(-2, 2, 50)])


def test_file_with_other_relocations_is_left_to_llvm(monkeypatch):
    monkeypatch.setattr(object_file, "_ABSOLUTE_ADDRESS", 2)
    code = machine_code(_apply, "function", {})
    assert object_file._place_elf(code, "function") is None
    assert run(object_file.place(code, "function"))[0] == 350
    assert object_file._place_elf(b"\xcf\xfa\xed\xfe" + code[4:], "function") is None
