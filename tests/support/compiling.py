"""Functions compiled to machine code, as Python functions."""

import ctypes
from collections.abc import Callable

from tgen.engine.cpu.compiler import Compiled, Parameters, machine_code
from tgen.engine.cpu.kernel_cache import NAME
from tgen.engine.cpu.object_file import place


def link(function: Compiled, parameters: Parameters | None = None) -> Callable[..., int]:
    """Compile a function of int64 numbers and make it callable."""
    code = machine_code(function, NAME, parameters or {})
    address = place(code, NAME)
    n = len(function.node.args.args)
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * n)
    return kind(address)
