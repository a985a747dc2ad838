"""Exponentials of whole vectors: softmax and the activations of feed-forward layers."""

from typing import Any

from llvmlite import ir

from tgen.engine.cpu.intrinsics import address, f32, i1, i32, i64, primitive
from tgen.engine.cpu.job_layout import LANES
from tgen.engine.cpu.simd import (
    INTEGERS,
    VECTOR,
    add,
    broadcast,
    element,
    fma,
    larger,
    load,
    loop,
    reduce,
    store,
)

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
    """Which of LANES numbers from j on are below the bound."""
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
