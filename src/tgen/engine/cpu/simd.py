"""Operations on SIMD vectors of 16 float32 numbers, as LLVM instructions.

Automatic vectorization may add numbers in any order. Here each sum has one fixed order for any
batch size, so a text is the same alone and in a batch. CPUs with narrower vectors take two or four
instructions instead of one. Addresses are int64, lengths count elements.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tgen.engine.cpu.intrinsics import address, f32, i32, i64, primitive
from tgen.engine.cpu.job_layout import BFLOAT16, FLOAT32, GROUP, GROUP_BYTES, INT8, LANES

_ROWS_AHEAD = 32
_GROUP_BYTES = {FLOAT32: 4 * GROUP, BFLOAT16: 2 * GROUP, INT8: GROUP_BYTES}

_i8, _i16 = ir.IntType(8), ir.IntType(16)
_vector, _integers = ir.VectorType(f32, LANES), ir.VectorType(i32, LANES)
_zeros = ir.Constant(_vector, [0.0] * LANES)


def make_tile(rows_per_tile: dict[int, int], dtype: int) -> Any:
    """tile(n_vectors, w, w_step, x, x_step, n, out, out_step): out[m, r] = w[r] . x[m] for
    rows_per_tile[n_vectors] rows of weights; the steps are bytes from one row to the next, n is a
    multiple of GROUP. Prefetches the weights of a later tile in memory order.
    """

    @primitive(types.void(*[address] * 8))
    def tile(b, n_vectors, w, w_step, x, x_step, n, out, out_step):
        after = b.append_basic_block("tile_done")
        switch = b.switch(n_vectors, after)
        for count, n_rows in rows_per_tile.items():
            case = b.append_basic_block(f"tile_{count}")
            switch.add_case(_int(count), case)
            b.position_at_end(case)
            _emit_tile(b, n_rows, count, dtype, w, w_step, x, x_step, n, out, out_step)
            b.branch(after)
        b.position_at_end(after)

    return tile


def _emit_tile(b, n_rows, n_vectors, dtype, w, w_step, x, x_step, n, out, out_step):
    w_rows = [_offset(b, w, w_step, r) for r in range(n_rows)]
    x_rows = [_offset(b, x, x_step, m) for m in range(n_vectors)]
    with _loop(b, n, n_rows * n_vectors, step=GROUP) as (j, sums, new_sums):
        new_sums += sums
        offset = b.mul(b.lshr(j, _int(5)), _int(_GROUP_BYTES[dtype]))
        groups = [b.add(row, offset) for row in w_rows]
        ahead = _offset(b, w, w_step, _ROWS_AHEAD)
        _prefetch(b, b.add(ahead, b.mul(offset, _int(n_rows))), n_rows * _GROUP_BYTES[dtype])
        for half in range(2):
            i = b.add(j, _int(LANES * half))
            xs = [_load(b, _element(b, row, i, 4), _vector) for row in x_rows]
            for r, group in enumerate(groups):
                weights = _load_half_group(b, group, half, dtype)
                for m in range(n_vectors):
                    k = r * n_vectors + m
                    new_sums[k] = _fma(b, weights, xs[m], new_sums[k])
    for r in range(n_rows):
        for m in range(n_vectors):
            total = _sum(b, new_sums[r * n_vectors + m])
            target = b.add(_offset(b, out, out_step, m), _int(4 * r))
            b.store(total, b.inttoptr(target, f32.as_pointer()))


def make_scores(n_blocks: int) -> Any:
    """scores(q, keys, size, out): out[s] = q . key s for 16 `n_blocks` keys.

    Keys are stored in blocks of 16 positions, each block as (size, 16).
    """

    @primitive(types.void(*[address] * 4))
    def scores(b, q, keys, size, out):
        blocks = [_offset(b, keys, b.mul(size, _int(64)), u) for u in range(n_blocks)]
        with _loop(b, size, n_blocks, step=1) as (d, sums, new_sums):
            number = _broadcast(b, _load(b, _element(b, q, d, 4), f32))
            for u, block in enumerate(blocks):
                values = _load(b, _element(b, block, d, 64), _vector)
                new_sums.append(_fma(b, number, values, sums[u]))
        for u in range(n_blocks):
            _store(b, new_sums[u], b.add(out, _int(64 * u)))

    return scores


def make_mix(n_vectors: int) -> Any:
    """mix(p, v, v_step, n, out): out[0 : 16 n_vectors] = the sum over n rows of p[s] * v[s]."""

    @primitive(types.void(*[address] * 5))
    def mix(b, p, v, v_step, n, out):
        with _loop(b, n, n_vectors, step=1) as (s, sums, new_sums):
            weight = _broadcast(b, _load(b, _element(b, p, s, 4), f32))
            row = b.add(v, b.mul(s, v_step))
            for u in range(n_vectors):
                values = _load(b, b.add(row, _int(64 * u)), _vector)
                new_sums.append(_fma(b, weight, values, sums[u]))
        for u in range(n_vectors):
            _store(b, new_sums[u], b.add(out, _int(64 * u)))

    return mix


@contextmanager
def _loop(
    b: ir.IRBuilder, n: ir.Value, n_sums: int, *, step: int
) -> Iterator[tuple[ir.Value, list[ir.Value], list[ir.Value]]]:
    """`for (j = 0; j < n; j += step)` that carries `n_sums` vectors, first zeros; n is at least 1.

    Yields j, the vectors, and an empty list for their new values.
    """
    before, body = b.block, b.append_basic_block("loop")
    after = b.append_basic_block("after")
    b.branch(body)
    b.position_at_end(body)
    j, sums = b.phi(i64), [b.phi(_vector) for _ in range(n_sums)]
    j.add_incoming(_int(0), before)
    for phi in sums:
        phi.add_incoming(_zeros, before)
    new_sums: list[ir.Value] = []
    yield j, sums, new_sums
    next_j = b.add(j, _int(step))
    j.add_incoming(next_j, body)
    for phi, value in zip(sums, new_sums, strict=True):
        phi.add_incoming(value, body)
    b.cbranch(b.icmp_signed("<", next_j, n), body, after)
    b.position_at_end(after)


def _int(value: int) -> ir.Constant:
    return ir.Constant(i64, value)


def _offset(b: ir.IRBuilder, address: ir.Value, step: ir.Value, times: int) -> ir.Value:
    return b.add(address, b.mul(step, _int(times)))


def _element(b: ir.IRBuilder, address: ir.Value, i: ir.Value, size: int) -> ir.Value:
    return b.add(address, b.mul(i, _int(size)))


def _load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 4


def _load_half_group(b: ir.IRBuilder, group: ir.Value, half: int, dtype: int) -> ir.Value:
    """Half the weights of a group as a float32 vector."""
    if dtype == INT8:
        upper = b.zext(_load(b, group, _i16), i32)
        scale = _broadcast(b, b.bitcast(b.shl(upper, ir.Constant(i32, 16)), f32))
        address = b.add(group, _int(2 + LANES * half))
        numbers = b.sext(_load(b, address, ir.VectorType(_i8, LANES)), _integers)
        return b.fmul(b.sitofp(numbers, _vector), scale)
    if dtype == FLOAT32:
        return _load(b, b.add(group, _int(4 * LANES * half)), _vector)
    # A bfloat16 is the upper half of a float32.
    address = b.add(group, _int(2 * LANES * half))
    upper = b.zext(_load(b, address, ir.VectorType(_i16, LANES)), _integers)
    return b.bitcast(b.shl(upper, ir.Constant(_integers, [16] * LANES)), _vector)


def _prefetch(b: ir.IRBuilder, address: ir.Value, n_bytes: int) -> None:
    """Prefetch memory into the L2 cache; has no effect past an array's end."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for line in range(0, n_bytes, 64):
        at = b.inttoptr(b.add(address, _int(line)), pointer)
        b.call(
            prefetch, [at, *(ir.Constant(i32, n) for n in (0, 2, 1))]
        )  # read, locality, data cache


def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_vector, [_vector] * 3)
    fma = cgutils.get_or_insert_function(b.module, kind, "llvm.fma.v16f32")
    return b.call(fma, [x, y, z])


def _sum(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Add the upper half to the lower half until one number is left: a fixed order."""
    n = LANES
    while n > 1:
        n //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        kind = ir.VectorType(i32, n)
        low = b.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(n))))
        high = b.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(n, 2 * n))))
        vector = b.fadd(low, high)
    return b.extract_element(vector, ir.Constant(i32, 0))


def _broadcast(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    undefined = ir.Constant(_vector, ir.Undefined)
    first = b.insert_element(undefined, value, ir.Constant(i32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(_integers, [0] * LANES))
