"""Exact dot products of small integers, by the instructions that the CPU has."""

from functools import partial
from typing import Any

from llvmlite import ir

from tgen.engine.cpu import target
from tgen.engine.cpu.intrinsics import declare, i32
from tgen.engine.cpu.job_layout import INT4, LANES, QUAD
from tgen.engine.cpu.simd import I8, I16, INTEGERS

_TAKE_UNSIGNED = {"avx512vnni": 16, "avxvnni": 8}  # features, and the lanes of their instruction


def choose_dot(dtype: int) -> Any:
    """Return dot(b, sums, w, x): sums + the dot products of each lane's four numbers.

    The inputs are signed, the weights unsigned: int8 weights are 128 too large, and the sums begin
    with -128 times the sum of the inputs (see `offset_factor`). Int4 weights are from 0 to 15.
    """
    known, signed = target.features(), dtype != INT4
    for feature, lanes in _TAKE_UNSIGNED.items():
        if feature in known:
            return _call_dot(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", lanes)
    if "avx2" in known:
        return partial(_avx2_dot, signed=signed)
    if "dotprod" in known and target.ARM:
        return partial(_arm_dot, signed=signed)
    return partial(_plain_dot, signed=signed)


def _call_dot(name: str, lanes: int) -> Any:
    kind = ir.VectorType(i32, lanes)

    def dot(b, sums, w, x):
        function = declare(b.module, ir.FunctionType(kind, [kind] * 3), name)
        parts = zip(*(_split(b, vector, lanes) for vector in (sums, w, x)), strict=True)
        return _join(b, [b.call(function, part) for part in parts])

    return dot


def _avx2_dot(b, sums, w, x, *, signed):
    """Sums of two products must fit in 16 bits: signed weights become |w|, and x their sign."""
    bytes32, words, integers = (ir.VectorType(*kind) for kind in ((I8, 32), (I16, 16), (i32, 8)))
    sign = declare(b.module, ir.FunctionType(bytes32, [bytes32] * 2), "llvm.x86.avx2.psign.b")
    pairs = declare(b.module, ir.FunctionType(words, [bytes32] * 2), "llvm.x86.avx2.pmadd.ub.sw")
    quads = declare(b.module, ir.FunctionType(integers, [words] * 2), "llvm.x86.avx2.pmadd.wd")
    results = []
    for part, w8, x8 in zip(*(_split(b, vector, 8) for vector in (sums, w, x)), strict=True):
        weights, numbers = b.bitcast(w8, bytes32), b.bitcast(x8, bytes32)
        if signed:
            weights = b.xor(weights, ir.Constant(bytes32, [-128] * 32))
            numbers = b.call(sign, [numbers, weights])
            weights = b.call(sign, [weights, weights])
        four = b.call(quads, [b.call(pairs, [weights, numbers]), ir.Constant(words, [1] * 16)])
        results.append(_pin(b, b.add(part, four)))
    return _join(b, results)


def _pin(b, value):
    """Compute a value here: LLVM would load much of what follows first, and spill registers."""
    kind = ir.FunctionType(value.type, [value.type])
    return b.asm(kind, "", "=x,0,~{memory}", [value], side_effect=True)


def _arm_dot(b, sums, w, x, *, signed):
    bytes16, integers = ir.VectorType(I8, 16), ir.VectorType(i32, 4)
    kind = ir.FunctionType(integers, [integers, bytes16, bytes16])
    sdot = declare(b.module, kind, "llvm.aarch64.neon.sdot.v4i32.v16i8")
    results = []
    for part, w4, x4 in zip(*(_split(b, vector, 4) for vector in (sums, w, x)), strict=True):
        weights = b.bitcast(w4, bytes16)
        if signed:
            weights = b.xor(weights, ir.Constant(bytes16, [-128] * 16))
        results.append(b.call(sdot, [part, weights, b.bitcast(x4, bytes16)]))
    return _join(b, results)


def _plain_dot(b, sums, w, x, *, signed):
    if signed:
        w = subtract_128(b, w)
    down = ir.Constant(INTEGERS, [24] * LANES)
    for byte in range(QUAD):
        up = ir.Constant(INTEGERS, [24 - 8 * byte] * LANES)
        number, weight = (b.ashr(b.shl(vector, up), down) for vector in (x, w))
        sums = b.add(sums, b.mul(weight, number))
    return sums


def offset_factor() -> int:
    """Return by what the sum of a group's inputs is multiplied for int8, see `choose_dot`."""
    takes_unsigned = any(name in target.features() for name in _TAKE_UNSIGNED)
    return -128 if takes_unsigned else 0


def subtract_128(b: ir.IRBuilder, weights: ir.Value) -> ir.Value:
    """Subtract 128 from each byte of a vector of integers."""
    return b.xor(weights, ir.Constant(INTEGERS, [-0x7F7F7F80] * LANES))  # the bytes' highest bits


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
