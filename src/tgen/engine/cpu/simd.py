"""Operations on SIMD vectors of 16 float32 numbers, as LLVM instructions.

Automatic vectorization may add numbers in any order. Here each sum has one fixed order for any
batch size, so a text is the same alone and in a batch. CPUs with narrower vectors take two or four
instructions instead of one. Addresses are int64, lengths count elements.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from tgen.engine.cpu import target
from tgen.engine.cpu.intrinsics import declare, f32, i32, i64
from tgen.engine.cpu.job_layout import LANES

I8, I16 = ir.IntType(8), ir.IntType(16)
VECTOR, INTEGERS = ir.VectorType(f32, LANES), ir.VectorType(i32, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)


@contextmanager
def loop(
    b: ir.IRBuilder, n: ir.Value, n_sums: int, *, step: int, start: ir.Constant = ZEROS
) -> Iterator[tuple[ir.Value, list[ir.Value], list[ir.Value]]]:
    """`for (j = 0; j < n; j += step)` that carries `n_sums` vectors; n is at least 1.

    Yields j, the vectors, and an empty list for their new values.
    """
    before, body = b.block, b.append_basic_block("loop")
    after = b.append_basic_block("after")
    b.branch(body)
    b.position_at_end(body)
    j, sums = b.phi(i64), [b.phi(start.type) for _ in range(n_sums)]
    j.add_incoming(integer(0), before)
    for phi in sums:
        phi.add_incoming(start, before)
    new_sums: list[ir.Value] = []
    yield j, sums, new_sums
    next_j = b.add(j, integer(step))
    j.add_incoming(next_j, b.block)
    for phi, value in zip(sums, new_sums, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", next_j, n), body, after)
    b.position_at_end(after)


def integer(value: int) -> ir.Constant:
    """An int64 constant."""
    return ir.Constant(i64, value)


def integers(value: int) -> ir.Constant:
    """A vector of one int32 constant."""
    return ir.Constant(INTEGERS, [value] * LANES)


def offset(b: ir.IRBuilder, address: ir.Value, step: ir.Value, times: int) -> ir.Value:
    """address + step * times."""
    return b.add(address, b.mul(step, integer(times)))


def element(b: ir.IRBuilder, address: ir.Value, i: ir.Value, size: int) -> ir.Value:
    """The address of number i, each of `size` bytes."""
    return b.add(address, b.mul(i, integer(size)))


def load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """Load a value, which need not be aligned."""
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def load_float16(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 float16 numbers as float32."""
    if target.has_float16():
        return b.fpext(load(b, address, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
    bits = b.zext(load(b, address, ir.VectorType(I16, LANES)), INTEGERS)
    sign = b.shl(b.and_(bits, integers(0x8000)), integers(16))
    rest = b.bitcast(b.shl(b.and_(bits, integers(0x7FFF)), integers(13)), VECTOR)
    magnitude = b.fmul(rest, ir.Constant(VECTOR, [2.0**112] * LANES))  # the exponents' difference
    return b.bitcast(b.or_(b.bitcast(magnitude, INTEGERS), sign), VECTOR)


def to_float16(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Round 16 numbers to float16, ties to even; larger ones become the largest. 16-bit integers.

    Integers only: without an instruction for it, LLVM would call a function.
    """
    bits = b.bitcast(vector, INTEGERS)
    sign = b.lshr(b.and_(bits, integers(0x80000000)), integers(16))
    magnitude = b.bitcast(b.and_(bits, integers(0x7FFFFFFF)), VECTOR)
    most = ir.Constant(VECTOR, [65504.0] * LANES)
    limited = b.select(b.fcmp_ordered(">", magnitude, most), most, magnitude)  # NaN stays
    small = b.bitcast(b.fmul(limited, ir.Constant(VECTOR, [2.0**-112] * LANES)), INTEGERS)
    odd = b.and_(b.lshr(small, integers(13)), integers(1))
    rounded = b.lshr(b.add(b.add(small, integers(0xFFF)), odd), integers(13))
    return b.trunc(b.or_(rounded, sign), ir.VectorType(I16, LANES))


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, *, align: int = 4) -> None:
    """Store a value; `align` is what the address is a multiple of."""
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """Bring the cache line at the address near, without waiting; any address is allowed."""
    pointer = b.inttoptr(address, I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
    function = b.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
    read, keep, data = ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)
    b.call(function, [pointer, read, keep, data])


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = declare(b.module, kind, "llvm.fma.v16f32")
    return b.call(fma, [x, y, z])


def reduce(b: ir.IRBuilder, vector: ir.Value, combine: Any) -> ir.Value:
    """Combine the upper half with the lower half until one number is left: a fixed order."""
    n = LANES
    while n > 1:
        n //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        kind = ir.VectorType(i32, n)
        low = b.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(n))))
        high = b.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(n, 2 * n))))
        vector = combine(b, low, high)
    return b.extract_element(vector, ir.Constant(i32, 0))


def add(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The sum of two numbers, or of each pair of two vectors."""
    return b.fadd(x, y)


def larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of two numbers, or of each pair of two vectors; y if one is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def broadcast(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector of one number."""
    kind = ir.VectorType(value.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undefined, value, ir.Constant(i32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))
