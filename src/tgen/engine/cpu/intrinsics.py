"""Functions that are LLVM instructions: the `primitive` decorator, and access to raw memory.

Addresses are int64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

f32, f64, i1, i32, i64 = (
    ir.FloatType(),
    ir.DoubleType(),
    ir.IntType(1),
    ir.IntType(32),
    ir.IntType(64),
)
address = i64


@dataclass(frozen=True)
class Primitive:
    """A function that compiled code can call: `emit(builder, *arguments)` writes its instructions
    and returns the result, if any; the arguments have these types."""

    emit: Callable[..., Any]
    types: tuple[ir.Type, ...]


def primitive(*types: ir.Type) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that writes instructions for arguments of these types a `Primitive`."""
    return lambda emit: Primitive(emit, types)


def declare(module: ir.Module, kind: ir.FunctionType, name: str) -> ir.Function:
    """Return the function of that name, an intrinsic or one of C; declare it first if needed."""
    return module.globals.get(name) or ir.Function(module, kind, name)


def _make_access(kind: ir.Type) -> tuple[Any, Any]:
    """load(base, i) and store(base, i, value): access to number i of a type after an address."""

    @primitive(address, i64)
    def load(b, base, i):
        return b.load(b.gep(b.inttoptr(base, kind.as_pointer()), [i]))

    @primitive(address, i64, kind)
    def store(b, base, i, value):
        b.store(value, b.gep(b.inttoptr(base, kind.as_pointer()), [i]))

    return load, store


load_float, store_float = _make_access(f32)
load_double, store_double = _make_access(f64)
load_int, store_int = _make_access(i64)


@primitive(i64)
def bits_to_float(b, bits):
    """Reinterpret the lower 32 bits as a float32."""
    return b.bitcast(b.trunc(bits, i32), f32)


@primitive(address, i64, i64, i64)
def call_address(b, function, x, y, z):
    """Call the C function at the address with three int64 numbers; it returns one, too."""
    kind = ir.FunctionType(i64, [i64] * 3)
    return b.call(b.inttoptr(function, kind.as_pointer()), [x, y, z])
