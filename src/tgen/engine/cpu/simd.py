"""Vectors of 16 numbers and what the kernels do with them, as LLVM instructions.

Numba's own vectors come from a compiler that may add numbers in any order. Here each sum has one
order, whatever the number of rows: text is the same alone and in a batch. A processor with narrower
vectors takes two or four steps for one of these. Addresses are int64, lengths count elements.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tgen.engine.cpu.job_layout import BFLOAT16, FLOAT32, GROUP, GROUP_BYTES, INT8, LANES

_ROWS_AHEAD = 32
_GROUP_BYTES = {FLOAT32: 4 * GROUP, BFLOAT16: 2 * GROUP, INT8: GROUP_BYTES}

_f32, _i8, _i16 = ir.FloatType(), ir.IntType(8), ir.IntType(16)
_i32, _i64 = ir.IntType(32), ir.IntType(64)
_vector = ir.VectorType(_f32, LANES)
_zeros = ir.Constant(_vector, [0.0] * LANES)
_address = types.int64


def make_tile(n_rows: int, n_vectors: int, stored: int) -> Any:
    """tile(w, w_step, x, x_step, n, out, out_step): out[m, r] = w[r] . x[m] for `n_rows` rows of
    weights and `n_vectors` vectors; the steps are bytes from one to the next, n is a multiple of
    GROUP. Weights of a later tile are asked for ahead, in the order in which they lie in memory.
    """

    @intrinsic
    def tile(_, w, w_step, x, x_step, n, out, out_step):
        def generate(context, b, _, arguments):
            w, w_step, x, x_step, n, out, out_step = arguments
            w_rows = [_offset(b, w, w_step, r) for r in range(n_rows)]
            x_rows = [_offset(b, x, x_step, m) for m in range(n_vectors)]
            with _loop(b, n, [_zeros] * (n_rows * n_vectors), step=GROUP) as (j, sums, following):
                following += sums
                offset = b.mul(b.lshr(j, _number(5)), _number(_GROUP_BYTES[stored]))
                groups = [b.add(row, offset) for row in w_rows]
                ahead = _offset(b, w, w_step, _ROWS_AHEAD)
                place = b.add(ahead, b.mul(offset, _number(n_rows)))
                _fetch(b, place, n_rows * _GROUP_BYTES[stored])
                for half in range(2):
                    i = b.add(j, _number(LANES * half))
                    xs = [_load(b, _element(b, row, i, 4), _vector) for row in x_rows]
                    for r, group in enumerate(groups):
                        weights = _load_half(b, group, half, stored)
                        for m in range(n_vectors):
                            k = r * n_vectors + m
                            following[k] = _fma(b, weights, xs[m], following[k])
            for r in range(n_rows):
                for m in range(n_vectors):
                    total = _sum(b, following[r * n_vectors + m])
                    place = b.add(_offset(b, out, out_step, m), _number(4 * r))
                    b.store(total, b.inttoptr(place, _f32.as_pointer()))
            return context.get_dummy_value()

        return types.void(*[_address] * 7), generate

    return tile


def make_scores(n_blocks: int) -> Any:
    """scores(q, keys, size, out): out[s] = q . key s for 16 `n_blocks` keys.

    Keys lie in blocks of 16, each (size, 16): a number of all 16, then the next.
    """

    @intrinsic
    def scores(_, q, keys, size, out):
        def generate(context, b, _, arguments):
            q, keys, size, out = arguments
            blocks = [_offset(b, keys, b.mul(size, _number(64)), u) for u in range(n_blocks)]
            with _loop(b, size, [_zeros] * n_blocks, step=1) as (d, sums, following):
                number = _spread(b, _load(b, _element(b, q, d, 4), _f32))
                for u, block in enumerate(blocks):
                    values = _load(b, _element(b, block, d, 64), _vector)
                    following.append(_fma(b, number, values, sums[u]))
            for u in range(n_blocks):
                _store(b, following[u], b.add(out, _number(64 * u)))
            return context.get_dummy_value()

        return types.void(*[_address] * 4), generate

    return scores


def make_mix(n_vectors: int) -> Any:
    """mix(p, v, v_step, n, out): out[0 : 16 n_vectors] = the sum over n rows of p[s] * v[s]."""

    @intrinsic
    def mix(_, p, v, v_step, n, out):
        def generate(context, b, _, arguments):
            p, v, v_step, n, out = arguments
            with _loop(b, n, [_zeros] * n_vectors, step=1) as (s, sums, following):
                share = _load(b, _element(b, p, s, 4), _f32)
                share = _spread(b, share)
                row = b.add(v, b.mul(s, v_step))
                for u in range(n_vectors):
                    values = _load(b, b.add(row, _number(64 * u)), _vector)
                    following.append(_fma(b, share, values, sums[u]))
            for u in range(n_vectors):
                _store(b, following[u], b.add(out, _number(64 * u)))
            return context.get_dummy_value()

        return types.void(*[_address] * 5), generate

    return mix


@intrinsic
def float_at(_, address, i):
    """The float32 number `i` after the address."""

    def generate(_, b, __, arguments):
        return b.load(_pointer(b, arguments[0], arguments[1], _f32))

    return types.float32(_address, types.int64), generate


@intrinsic
def put_float(_, address, i, value):
    """Stores a float32 as number `i` after the address."""

    def generate(context, b, _, arguments):
        address, i, value = arguments
        b.store(value, _pointer(b, address, i, _f32))
        return context.get_dummy_value()

    return types.void(_address, types.int64, types.float32), generate


@intrinsic
def int_at(_, address, i):
    """The int64 number `i` after the address."""

    def generate(_, b, __, arguments):
        return b.load(_pointer(b, arguments[0], arguments[1], _i64))

    return types.int64(_address, types.int64), generate


@intrinsic
def float_of_bits(_, bits):
    """The float32 with these bits."""

    def generate(_, b, __, arguments):
        return b.bitcast(arguments[0], _f32)

    return types.float32(types.int32), generate


class _loop:  # noqa: N801
    """`for (j = 0; j < n; j += step)` with vectors carried along; n is at least 1."""

    def __init__(self, b: ir.IRBuilder, n: ir.Value, start: list[ir.Value], *, step: int) -> None:
        self.b, self.n, self.step = b, n, step
        before, self.body = b.block, b.append_basic_block("loop")
        self.after = b.append_basic_block("after")
        b.branch(self.body)
        b.position_at_end(self.body)
        self.j = b.phi(_i64)
        self.j.add_incoming(_number(0), before)
        self.carried = [b.phi(value.type) for value in start]
        for phi, value in zip(self.carried, start, strict=True):
            phi.add_incoming(value, before)
        self.following: list[ir.Value] = []

    def __enter__(self) -> tuple[ir.Value, list[ir.Value], list[ir.Value]]:
        return self.j, self.carried, self.following

    def __exit__(self, *_: object) -> None:
        b = self.b
        following = b.add(self.j, _number(self.step))
        self.j.add_incoming(following, self.body)
        for phi, value in zip(self.carried, self.following, strict=True):
            phi.add_incoming(value, self.body)
        b.cbranch(b.icmp_signed("<", following, self.n), self.body, self.after)
        b.position_at_end(self.after)


def _number(value: int) -> ir.Constant:
    return ir.Constant(_i64, value)


def _offset(b: ir.IRBuilder, address: ir.Value, step: ir.Value, times: int) -> ir.Value:
    return b.add(address, b.mul(step, _number(times)))


def _element(b: ir.IRBuilder, address: ir.Value, i: ir.Value, size: int) -> ir.Value:
    return b.add(address, b.mul(i, _number(size)))


def _pointer(b: ir.IRBuilder, address: ir.Value, i: ir.Value, kind: ir.Type) -> ir.Value:
    return b.gep(b.inttoptr(address, kind.as_pointer()), [i])


def _load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 4


def _load_half(b: ir.IRBuilder, group: ir.Value, half: int, stored: int) -> ir.Value:
    """Half a group's weights in float32: a vector."""
    integers = ir.VectorType(_i32, LANES)
    if stored == INT8:
        upper = b.zext(_load(b, group, _i16), _i32)
        scale = _spread(b, b.bitcast(b.shl(upper, ir.Constant(_i32, 16)), _f32))
        place = b.add(group, _number(2 + LANES * half))
        numbers = b.sext(_load(b, place, ir.VectorType(_i8, LANES)), integers)
        return b.fmul(b.sitofp(numbers, _vector), scale)
    if stored == FLOAT32:
        return _load(b, b.add(group, _number(4 * LANES * half)), _vector)
    # A bfloat16 is the upper half of a float32.
    place = b.add(group, _number(2 * LANES * half))
    upper = b.zext(_load(b, place, ir.VectorType(_i16, LANES)), integers)
    return b.bitcast(b.shl(upper, ir.Constant(integers, [16] * LANES)), _vector)


def _fetch(b: ir.IRBuilder, place: ir.Value, n_bytes: int) -> None:
    """Brings memory near, into the second cache: past an array's end it does nothing."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _i32, _i32, _i32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for line in range(0, n_bytes, 64):
        at = b.inttoptr(b.add(place, _number(line)), pointer)
        b.call(prefetch, [at, *(ir.Constant(_i32, n) for n in (0, 2, 1))])  # to read, near, data


def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_vector, [_vector] * 3)
    fma = cgutils.get_or_insert_function(b.module, kind, "llvm.fma.v16f32")
    return b.call(fma, [x, y, z])


def _sum(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Halves added to halves: one order, always."""
    n = LANES
    while n > 1:
        n //= 2
        nothing = ir.Constant(vector.type, ir.Undefined)
        kind = ir.VectorType(_i32, n)
        low = b.shuffle_vector(vector, nothing, ir.Constant(kind, list(range(n))))
        high = b.shuffle_vector(vector, nothing, ir.Constant(kind, list(range(n, 2 * n))))
        vector = b.fadd(low, high)
    return b.extract_element(vector, ir.Constant(_i32, 0))


def _spread(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    nothing = ir.Constant(_vector, ir.Undefined)
    first = b.insert_element(nothing, value, ir.Constant(_i32, 0))
    return b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_i32, LANES), [0] * LANES))
