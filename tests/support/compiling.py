"""Functions compiled to machine code, as Python functions."""

import ctypes
from collections.abc import Callable

from tgen.engine.cpu import kernel_cache
from tgen.engine.cpu.compiler import Compiled, Parameters, machine_code

linkers = []  # they own the machine code


def link(function: Compiled, parameters: Parameters | None = None) -> Callable[..., int]:
    """Compile a function of int64 numbers and make it callable."""
    code = machine_code(function, kernel_cache.NAME, parameters or {})
    linker, address = kernel_cache.link(code)
    n = len(function.node.args.args)
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * n)
    linkers.append(linker)
    return kind(address)
