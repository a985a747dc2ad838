"""Functions that are LLVM instructions: the `primitive` decorator, and access to raw memory.

Addresses are int64.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing import Signature
from numba.extending import intrinsic

f32, f64, i32, i64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
address = types.int64  # Numba's type of an address


def primitive(signature: Signature) -> Callable[[Callable[..., Any]], Any]:
    """Make compiled code call a function `emit(builder, *arguments)` as one with the signature."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def declare(*_: Any) -> Any:
            def generate(context: Any, b: ir.IRBuilder, _: Any, arguments: Any) -> Any:
                result = emit(b, *arguments)
                return context.get_dummy_value() if result is None else result

            return signature, generate

        declare.__dict__["__signature__"] = inspect.signature(emit)  # Numba reads the arguments
        return intrinsic(declare)

    return decorate


@primitive(types.float32(address, types.int64))
def load_float(b, base, i):
    """Load float32 number `i` after the address."""
    return b.load(_pointer(b, base, i, f32))


@primitive(types.void(address, types.int64, types.float32))
def store_float(b, base, i, value):
    """Store float32 number `i` after the address."""
    b.store(value, _pointer(b, base, i, f32))


@primitive(types.float64(address, types.int64))
def load_double(b, base, i):
    """Load float64 number `i` after the address."""
    return b.load(_pointer(b, base, i, f64))


@primitive(types.void(address, types.int64, types.float64))
def store_double(b, base, i, value):
    """Store float64 number `i` after the address."""
    b.store(value, _pointer(b, base, i, f64))


@primitive(types.int64(address, types.int64))
def load_int(b, base, i):
    """Load int64 number `i` after the address."""
    return b.load(_pointer(b, base, i, i64))


@primitive(types.void(address, types.int64, types.int64))
def store_int(b, base, i, value):
    """Store int64 number `i` after the address."""
    b.store(value, _pointer(b, base, i, i64))


@primitive(types.float32(types.int32))
def bits_to_float(b, bits):
    """Reinterpret 32 bits as a float32."""
    return b.bitcast(bits, f32)


def _pointer(b: ir.IRBuilder, base: ir.Value, i: ir.Value, kind: ir.Type) -> ir.Value:
    return b.gep(b.inttoptr(base, kind.as_pointer()), [i])
