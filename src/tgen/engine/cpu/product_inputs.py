"""Inputs of matrix products, rounded like the weights."""

from llvmlite import ir

from tgen.engine.cpu.integer_dot import offset_factor
from tgen.engine.cpu.intrinsics import address, f32, i32, i64, primitive
from tgen.engine.cpu.job_layout import GROUP, LANES
from tgen.engine.cpu.simd import (
    I8,
    I16,
    INTEGERS,
    VECTOR,
    broadcast,
    integer,
    integers,
    load,
    offset,
    reduce,
    store,
)


@primitive(address, address)
def round_to_bfloat16(b, x, out):
    """Round LANES float32 numbers to bfloat16, ties to even, and write them as float32."""
    store(b, b.bitcast(_rounded_bits(b, load(b, x, VECTOR)), VECTOR), out)


@primitive(address, address)
def pack_bfloat16(b, x, out):
    """Round GROUP float32 numbers to bfloat16, and write them as such."""
    for i in range(0, GROUP, LANES):
        bits = _rounded_bits(b, load(b, b.add(x, integer(4 * i)), VECTOR))
        upper = b.trunc(b.lshr(bits, integers(16)), ir.VectorType(I16, LANES))
        store(b, upper, b.add(out, integer(2 * i)))


def _rounded_bits(b, numbers):
    """Bits of bfloat16 numbers in the upper halves. Too small ones become 0, as AMX takes them."""
    bits = b.bitcast(numbers, INTEGERS)
    odd = b.and_(b.lshr(bits, integers(16)), integers(1))
    rounded = b.add(b.add(bits, integers(0x7FFF)), odd)
    rounded = b.select(b.fcmp_unordered("uno", numbers, numbers), bits, rounded)  # NaN stays
    upper = b.and_(rounded, integers(-1 << 16))
    exponent = b.and_(upper, integers(0x7F800000))
    return b.select(b.icmp_signed("==", exponent, integers(0)), integers(0), upper)


def _larger_integer(b, x, y):
    return b.select(b.icmp_signed(">", x, y), x, y)


@primitive(address, address, address, i64)
def quantize_group(b, x, out, factors, step):
    """Write GROUP float32 numbers as an input of integer products: integers from -127 to 127; then
    at `factors`, and each `step` bytes after it, the scale, which is the largest magnitude / 127,
    where the sums of int8 products begin, and the rounded numbers' sum."""
    halves = [load(b, b.add(x, integer(4 * LANES * half)), VECTOR) for half in range(2)]
    # The largest magnitude is that of the largest integer without the sign; NaN is above all.
    positive = integers(0x7FFFFFFF)
    one, two = (b.and_(b.bitcast(half, INTEGERS), positive) for half in halves)
    largest = b.bitcast(reduce(b, _larger_integer(b, one, two), _larger_integer), f32)
    is_zero = b.fcmp_ordered("==", largest, ir.Constant(f32, 0.0))
    inverse = b.fdiv(ir.Constant(f32, 127.0), b.select(is_zero, ir.Constant(f32, 1.0), largest))
    rounding = ir.Constant(VECTOR, [float(3 << 22)] * LANES)  # adding it rounds to an integer
    sums = None
    for half, numbers in enumerate(halves):
        shifted = b.fadd(b.fmul(numbers, broadcast(b, inverse)), rounding)
        rounded = b.sub(b.bitcast(shifted, INTEGERS), b.bitcast(rounding, INTEGERS))
        pointer = b.add(out, integer(LANES * half))
        store(b, b.trunc(rounded, ir.VectorType(I8, LANES)), pointer, align=1)
        sums = rounded if sums is None else b.add(sums, rounded)
    scale = b.fmul(largest, ir.Constant(f32, 1 / 127))
    total = reduce(b, sums, lambda b, x, y: b.add(x, y))
    start = b.mul(total, ir.Constant(i32, offset_factor()))
    for i, factor in enumerate((scale, start, b.fmul(scale, b.sitofp(total, f32)))):
        store(b, factor, offset(b, factors, step, i))
