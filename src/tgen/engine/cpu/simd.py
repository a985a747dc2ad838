"""Operations on SIMD vectors of 16 float32 numbers, as LLVM instructions, up to whole vectors'
exponentials: softmax and the activations of feed-forward layers.

Automatic vectorization may add numbers in any order. Here each sum has one fixed order for any
batch size, so a text is the same alone and in a batch. CPUs with narrower vectors take two or four
instructions instead of one. Addresses are int64, lengths count elements.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from tgen.engine.cpu import target
from tgen.engine.cpu.intrinsics import address, declare, f32, i1, i32, i64, primitive
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


def load_int8(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 int8 numbers as float32."""
    return b.sitofp(b.sext(load(b, address, ir.VectorType(I8, LANES)), INTEGERS), VECTOR)


def to_integers(b: ir.IRBuilder, numbers: ir.Value, factor: ir.Value) -> ir.Value:
    """16 numbers times a factor, rounded to int32; magnitudes are below 2^22."""
    rounding = ir.Constant(VECTOR, [float(3 << 22)] * LANES)  # adding it rounds to an integer
    shifted = b.fadd(b.fmul(numbers, broadcast(b, factor)), rounding)
    return b.sub(b.bitcast(shifted, INTEGERS), b.bitcast(rounding, INTEGERS))


def magnitude_bits(b: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """Integers in the order of the magnitudes of 16 numbers; NaN is above all."""
    return b.and_(b.bitcast(numbers, INTEGERS), integers(0x7FFFFFFF))


def larger_integer(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of two integers, or of each pair of two vectors."""
    return b.select(b.icmp_signed(">", x, y), x, y)


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


_MAX_EXPONENT = 87.0  # exp overflows float32 beyond it, and is almost 0 below its negative
_EXP = (  # Cephes' expf: the polynomial that is left after powers of 2 are taken out
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip


def _constant(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def exp_vector(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x, accurate to 2 ulp."""
    x = larger(b, _constant(-_MAX_EXPONENT), x)  # in this order, NaN stays NaN
    x = b.fneg(larger(b, _constant(-_MAX_EXPONENT), b.fneg(x)))
    rounding = _constant(float(3 << 22))  # adding and subtracting it rounds to an integer
    k = b.fsub(b.fadd(b.fmul(x, _constant(1.44269504)), rounding), rounding)
    r = fma(b, k, _constant(-0.693359375), x)
    r = fma(b, k, _constant(2.12194440e-4), r)
    p = _constant(_EXP[0])
    for coefficient in _EXP[1:]:
        p = fma(b, p, r, _constant(coefficient))
    p = b.fadd(fma(b, p, b.fmul(r, r), r), _constant(1.0))
    exponent = b.add(b.fptosi(k, INTEGERS), ir.Constant(INTEGERS, [127] * LANES))
    power = b.bitcast(b.shl(exponent, ir.Constant(INTEGERS, [23] * LANES)), VECTOR)
    return b.fmul(p, power)


@primitive(f32)
def exp(b, x):
    """e^x."""
    return b.extract_element(exp_vector(b, broadcast(b, x)), ir.Constant(i32, 0))


@primitive(address, *[i64] * 3, f32, address)
def exp_scores(b, x, first, end, n, scale, out):
    """x[i] = e^(scale * (x[i] - maximum)) from `first` to `end`, 0 elsewhere in n numbers, rounded
    up to whole vectors; the maximum and the sum go to `out`. Each number has its place in the order
    of the sum, and an empty sum is 0."""

    def is_inside(j):
        return b.and_(b.not_(_is_below(b, j, first)), _is_below(b, j, end))

    lowest = _constant(-3e38)
    with loop(b, n, 1, step=LANES, start=lowest) as (j, (most,), new):
        value = load(b, element(b, x, j, 4), VECTOR)
        new.append(larger(b, b.select(is_inside(j), value, lowest), most))
    maximum = reduce(b, new[0], larger)
    largest = broadcast(b, maximum)
    with loop(b, n, 1, step=LANES) as (j, (total,), new):
        pointer = element(b, x, j, 4)
        scaled = b.fmul(b.fsub(load(b, pointer, VECTOR), largest), broadcast(b, scale))
        value = b.select(is_inside(j), exp_vector(b, scaled), _constant(0.0))
        store(b, value, pointer)
        new.append(b.fadd(total, value))
    store(b, maximum, out)
    store(b, reduce(b, new[0], add), b.add(out, ir.Constant(out.type, 4)))


@primitive(address, i64, f32, i1)
def sum_of(b, x, n, mean, squared):
    """The sum of x[i] - mean, or of its squares, over n numbers; x has whole vectors."""
    with loop(b, n, 1, step=LANES) as (j, (total,), new):
        value = b.fsub(load(b, element(b, x, j, 4), VECTOR), broadcast(b, mean))
        value = b.select(_is_below(b, j, n), value, _constant(0.0))
        new.append(fma(b, value, b.select(squared, value, _constant(1.0)), total))
    return reduce(b, new[0], add)


def _is_below(b: ir.IRBuilder, j: ir.Value, bound: ir.Value) -> ir.Value:
    """Mark those of LANES numbers from j on that are below the bound."""
    lanes = ir.Constant(INTEGERS, list(range(LANES)))
    i = b.add(broadcast(b, b.trunc(j, i32)), lanes)
    return b.icmp_signed("<", i, broadcast(b, b.trunc(bound, i32)))


def _make_activation(emit: Any) -> Any:
    """activation(up, gate, n): up[i] = emit(up[i], gate[i]) for n numbers in whole vectors."""

    @primitive(address, address, i64)
    def activation(b, up, gate, n):
        with loop(b, n, 0, step=LANES) as (j, _, _):
            pointers = [element(b, start, j, 4) for start in (up, gate)]
            store(b, emit(b, *[load(b, pointer, VECTOR) for pointer in pointers]), pointers[0])

    return activation


def _silu(b, z):
    return b.fdiv(z, b.fadd(_constant(1.0), exp_vector(b, b.fneg(z))))


def _gelu_tanh(b, z):
    cube = b.fmul(b.fmul(b.fmul(_constant(0.044715), z), z), z)
    inner = b.fmul(_constant(-1.5957691216), b.fadd(z, cube))
    return b.fdiv(z, b.fadd(_constant(1.0), exp_vector(b, inner)))


swiglu = _make_activation(lambda b, up, gate: b.fmul(up, _silu(b, gate)))
geglu = _make_activation(lambda b, up, gate: b.fmul(up, _gelu_tanh(b, gate)))
gelu_tanh = _make_activation(lambda b, up, _: _gelu_tanh(b, up))
relu = _make_activation(lambda b, up, _: larger(b, _constant(0.0), up))
relu2 = _make_activation(lambda b, up, _: b.fmul(up, larger(b, _constant(0.0), up)))
