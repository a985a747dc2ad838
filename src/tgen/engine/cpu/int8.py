"""Exact dot products of int8 numbers, by the instructions that the CPU has, and their inputs."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tgen.engine.cpu import target
from tgen.engine.cpu.intrinsics import address, f32, i32, primitive
from tgen.engine.cpu.job_layout import GROUP, LANES, QUAD
from tgen.engine.cpu.simd import (
    I8,
    I16,
    INTEGERS,
    VECTOR,
    broadcast,
    integer,
    load,
    reduce,
    store,
)


def choose_dot() -> Any:
    """Return dot(b, sums, w, x): sums + the dot products of each lane's four numbers.

    The weights are unsigned, 128 too large, and the inputs signed: the sums begin with -128 times
    the sum of the inputs.
    """
    known = target.features()
    if "avx512vnni" in known:
        return _call_dot("llvm.x86.avx512.vpdpbusd.512", LANES)
    if "avxvnni" in known:
        return _call_dot("llvm.x86.avx512.vpdpbusd.256", 8)
    if "avx2" in known:
        return _avx2_dot
    if "dotprod" in known and target.ARM:
        return _arm_dot
    return _plain_dot


def _call_dot(name: str, lanes: int) -> Any:
    kind = ir.VectorType(i32, lanes)

    def dot(b, sums, w, x):
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name)
        parts = zip(*(_split(b, vector, lanes) for vector in (sums, w, x)), strict=True)
        return _join(b, [b.call(function, part) for part in parts])

    return dot


def _avx2_dot(b, sums, w, x):
    """Signed products by |w| and x with the sign of w, since sums of two must fit in 16 bits."""
    bytes32, words, integers = (ir.VectorType(*kind) for kind in ((I8, 32), (I16, 16), (i32, 8)))
    call = cgutils.get_or_insert_function
    sign = call(b.module, ir.FunctionType(bytes32, [bytes32] * 2), "llvm.x86.avx2.psign.b")
    pairs = call(b.module, ir.FunctionType(words, [bytes32] * 2), "llvm.x86.avx2.pmadd.ub.sw")
    quads = call(b.module, ir.FunctionType(integers, [words] * 2), "llvm.x86.avx2.pmadd.wd")
    results = []
    for part, w8, x8 in zip(*(_split(b, vector, 8) for vector in (sums, w, x)), strict=True):
        signed = b.xor(b.bitcast(w8, bytes32), ir.Constant(bytes32, [-128] * 32))
        products = b.call(
            pairs,
            [b.call(sign, [signed, signed]), b.call(sign, [b.bitcast(x8, bytes32), signed])],
        )
        four = b.call(quads, [products, ir.Constant(words, [1] * 16)])
        results.append(_pin(b, b.add(part, four)))
    return _join(b, results)


def _pin(b, value):
    """Compute a value here: LLVM would load much of what follows first, and spill registers."""
    kind = ir.FunctionType(value.type, [value.type])
    return b.asm(kind, "", "=x,0,~{memory}", [value], side_effect=True)


def _arm_dot(b, sums, w, x):
    bytes16, integers = ir.VectorType(I8, 16), ir.VectorType(i32, 4)
    kind = ir.FunctionType(integers, [integers, bytes16, bytes16])
    sdot = cgutils.get_or_insert_function(b.module, kind, "llvm.aarch64.neon.sdot.v4i32.v16i8")
    results = []
    for part, w4, x4 in zip(*(_split(b, vector, 4) for vector in (sums, w, x)), strict=True):
        signed = b.xor(b.bitcast(w4, bytes16), ir.Constant(bytes16, [-128] * 16))
        results.append(b.call(sdot, [part, signed, b.bitcast(x4, bytes16)]))
    return _join(b, results)


def _plain_dot(b, sums, w, x):
    for byte in range(QUAD):
        up = ir.Constant(INTEGERS, [24 - 8 * byte] * LANES)
        down = ir.Constant(INTEGERS, [24] * LANES)
        number = b.ashr(b.shl(x, up), down)
        weight = b.ashr(b.shl(b.xor(w, ir.Constant(INTEGERS, [-0x7F7F7F80] * LANES)), up), down)
        sums = b.add(sums, b.mul(weight, number))
    return sums


def offset_factor() -> int:
    """Return by what the sum of a group's inputs is multiplied, see `choose_dot`."""
    known = target.features()
    unsigned = "avx512vnni" in known or "avxvnni" in known
    return -128 if unsigned else 0


def _split(b, vector, lanes):
    if lanes == LANES:
        return [vector]
    undefined = ir.Constant(vector.type, ir.Undefined)
    masks = [list(range(i, i + lanes)) for i in range(0, LANES, lanes)]
    kind = ir.VectorType(i32, lanes)
    return [b.shuffle_vector(vector, undefined, ir.Constant(kind, mask)) for mask in masks]


def _join(b, parts):
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        mask = ir.Constant(ir.VectorType(i32, n), list(range(n)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [b.shuffle_vector(one, two, mask) for one, two in pairs]
    return parts[0]


def _larger_integer(b, x, y):
    return b.select(b.icmp_signed(">", x, y), x, y)


@primitive(types.void(address, address))
def quantize_group(b, x, out):
    """Write GROUP float32 numbers as the input of int8 products: integers from -127 to 127, the
    scale, which is the largest magnitude / 127, and where the sums of the products begin."""
    halves = [load(b, b.add(x, integer(4 * LANES * half)), VECTOR) for half in range(2)]
    # The largest magnitude is that of the largest integer without the sign; NaN is above all.
    positive = ir.Constant(INTEGERS, [0x7FFFFFFF] * LANES)
    one, two = (b.and_(b.bitcast(half, INTEGERS), positive) for half in halves)
    largest = b.bitcast(reduce(b, _larger_integer(b, one, two), _larger_integer), f32)
    is_zero = b.fcmp_ordered("==", largest, ir.Constant(f32, 0.0))
    inverse = b.fdiv(ir.Constant(f32, 127.0), b.select(is_zero, ir.Constant(f32, 1.0), largest))
    rounding = ir.Constant(VECTOR, [float(3 << 22)] * LANES)  # adding it rounds to an integer
    sums = None
    for half, numbers in enumerate(halves):
        shifted = b.fadd(b.fmul(numbers, broadcast(b, inverse)), rounding)
        integers = b.sub(b.bitcast(shifted, INTEGERS), b.bitcast(rounding, INTEGERS))
        place = b.add(out, integer(LANES * half))
        store(b, b.trunc(integers, ir.VectorType(I8, LANES)), place, align=1)
        sums = integers if sums is None else b.add(sums, integers)
    scale = b.fmul(largest, ir.Constant(f32, 1 / 127))
    total = b.mul(reduce(b, sums, lambda b, x, y: b.add(x, y)), ir.Constant(i32, offset_factor()))
    store(b, scale, b.add(out, integer(GROUP)))
    store(b, total, b.add(out, integer(GROUP + 4)))
