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


@primitive(address, i64)
def load_float(b, base, i):
    """Load float32 number `i` after the address."""
    return b.load(_pointer(b, base, i, f32))


@primitive(address, i64, f32)
def store_float(b, base, i, value):
    """Store float32 number `i` after the address."""
    b.store(value, _pointer(b, base, i, f32))


@primitive(address, i64)
def load_double(b, base, i):
    """Load float64 number `i` after the address."""
    return b.load(_pointer(b, base, i, f64))


@primitive(address, i64, f64)
def store_double(b, base, i, value):
    """Store float64 number `i` after the address."""
    b.store(value, _pointer(b, base, i, f64))


@primitive(address, i64)
def load_int(b, base, i):
    """Load int64 number `i` after the address."""
    return b.load(_pointer(b, base, i, i64))


@primitive(address, i64, i64)
def store_int(b, base, i, value):
    """Store int64 number `i` after the address."""
    b.store(value, _pointer(b, base, i, i64))


@primitive(i64)
def bits_to_float(b, bits):
    """Reinterpret the lower 32 bits as a float32."""
    return b.bitcast(b.trunc(bits, i32), f32)


@primitive(address, i64, i64, i64)
def call_address(b, function, x, y, z):
    """Call the C function at the address with three int64 numbers; it returns one, too."""
    kind = ir.FunctionType(i64, [i64] * 3)
    return b.call(b.inttoptr(function, kind.as_pointer()), [x, y, z])


def _pointer(b: ir.IRBuilder, base: ir.Value, i: ir.Value, kind: ir.Type) -> ir.Value:
    return b.gep(b.inttoptr(base, kind.as_pointer()), [i])
