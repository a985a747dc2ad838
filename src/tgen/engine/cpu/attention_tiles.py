"""Tiles of attention: some queries times blocks of keys, and their weights times values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from tgen.engine.cpu.intrinsics import address, f32, i32, i64, primitive
from tgen.engine.cpu.job_layout import CACHE_LINE, FLOAT16, FLOAT32, INT8, LANES, QUERIES, TINY
from tgen.engine.cpu.simd import (
    I8,
    INTEGERS,
    VECTOR,
    broadcast,
    element,
    fma,
    integer,
    larger_integer,
    load,
    load_float16,
    load_int8,
    loop,
    magnitude_bits,
    offset,
    prefetch,
    reduce,
    store,
    to_float16,
    to_integers,
)

_BYTES = {FLOAT32: 4, FLOAT16: 2, INT8: 1}
_PREFETCH_BYTES = 4096  # from the values in use to those that are fetched meanwhile


def make_scores(n_blocks: int, dtype: int) -> Any:
    """scores(count, queries, keys, size, out, out_step): out[m, s] = query m . key s for `count`
    queries, at the addresses `queries`, and 16 `n_blocks` keys.

    Keys of the dtype are stored in blocks of 16 positions, each block as (size, 16).
    """
    line = LANES * _BYTES[dtype]

    @primitive(*[address] * 6)
    def scores(b, count, queries, keys, size, out, out_step):
        with _case_per_count(b, count) as counts:
            for n in counts:
                vectors = [load(b, b.add(queries, integer(8 * m)), i64) for m in range(n)]
                blocks = [offset(b, keys, b.mul(size, integer(line)), u) for u in range(n_blocks)]
                with loop(b, size, n * n_blocks, step=1) as (d, sums, new_sums):
                    pointers = [element(b, block, d, line) for block in blocks]
                    for pointer in pointers:
                        prefetch(b, b.add(pointer, b.mul(size, integer(line * n_blocks))))
                    values = [_load(b, pointer, dtype) for pointer in pointers]
                    for m, q in enumerate(vectors):
                        number = broadcast(b, load(b, element(b, q, d, 4), f32))
                        for u, value in enumerate(values):
                            new_sums.append(fma(b, number, value, sums[m * n_blocks + u]))
                for k, total in enumerate(new_sums):
                    m, u = divmod(k, n_blocks)
                    store(b, total, b.add(offset(b, out, out_step, m), integer(64 * u)))

    return scores


def make_weighted_sum(n_vectors: int, dtype: int) -> Any:
    """weighted_sum(count, p, p_step, v, v_step, n, out, out_step): out[m, 0 : 16 n_vectors] = the
    sum over n rows of p[m, s] * v[s], for `count` rows of p. v is of the dtype."""
    line = LANES * _BYTES[dtype]

    @primitive(*[address] * 8)
    def weighted_sum(b, count, p, p_step, v, v_step, n, out, out_step):
        with _case_per_count(b, count) as counts:
            for n_rows in counts:
                rows = [offset(b, p, p_step, m) for m in range(n_rows)]
                with loop(b, n, n_rows * n_vectors, step=1) as (s, sums, new_sums):
                    row = b.add(v, b.mul(s, v_step))
                    for u in range(0, n_vectors * line, CACHE_LINE):
                        prefetch(b, b.add(row, integer(_PREFETCH_BYTES + u)))
                    values = [
                        _load(b, b.add(row, integer(line * u)), dtype) for u in range(n_vectors)
                    ]
                    for m, weights in enumerate(rows):
                        weight = broadcast(b, load(b, element(b, weights, s, 4), f32))
                        for u, value in enumerate(values):
                            new_sums.append(fma(b, weight, value, sums[m * n_vectors + u]))
                for k, total in enumerate(new_sums):
                    m, u = divmod(k, n_vectors)
                    store(b, total, b.add(offset(b, out, out_step, m), integer(64 * u)))

    return weighted_sum


@primitive(address, i64, address, i64)
def store_float16(b, base, i, vector, step):
    """Round a vector of LANES numbers to float16, and store them as numbers i, i + step, ... after
    the address."""
    numbers = to_float16(b, load(b, vector, VECTOR))
    for lane in range(LANES):
        pointer = element(b, base, b.add(i, b.mul(step, integer(lane))), 2)
        store(b, b.extract_element(numbers, integer(lane)), pointer, align=2)


@primitive(address, i64)
def find_scale(b, vector, n):
    """The scale of n numbers in whole vectors as int8: the largest magnitude / 127, rounded up to
    16 significant bits. So 127 scales are a float32, and the numbers that int8 numbers and a scale
    make have the same ones again. Scales of tiny numbers are 0."""
    start = ir.Constant(INTEGERS, [0] * LANES)
    with loop(b, n, 1, step=LANES, start=start) as (j, (most,), new):
        numbers = load(b, element(b, vector, j, 4), VECTOR)
        new.append(larger_integer(b, magnitude_bits(b, numbers), most))
    largest = b.bitcast(reduce(b, new[0], larger_integer), f32)
    bits = b.bitcast(b.fdiv(largest, ir.Constant(f32, 127.0)), i32)
    scale = b.and_(b.add(bits, ir.Constant(i32, 0xFF)), ir.Constant(i32, ~0xFF))
    is_tiny = b.fcmp_ordered("<", largest, ir.Constant(f32, TINY))
    return b.select(is_tiny, ir.Constant(f32, 0.0), b.bitcast(scale, f32))


@primitive(address, i64, address, i64, f32)
def store_int8(b, base, i, vector, step, inverse):
    """Round a vector of LANES numbers times `inverse`, the scale's, to int8, and store them as
    numbers i, i + step, ... after the address."""
    numbers = b.trunc(to_integers(b, load(b, vector, VECTOR), inverse), ir.VectorType(I8, LANES))
    for lane in range(LANES):
        pointer = b.add(base, b.add(i, b.mul(step, integer(lane))))
        store(b, b.extract_element(numbers, integer(lane)), pointer, align=1)


@primitive(address, address, i64)
def multiply(b, x, y, n):
    """x[i] *= y[i] for n numbers, rounded up to whole vectors."""
    with loop(b, n, 0, step=LANES) as (j, _, _):
        one, two = (element(b, start, j, 4) for start in (x, y))
        store(b, b.fmul(load(b, one, VECTOR), load(b, two, VECTOR)), one)


def _load(b: ir.IRBuilder, pointer: ir.Value, dtype: int) -> ir.Value:
    if dtype == FLOAT32:
        return load(b, pointer, VECTOR)
    return load_float16(b, pointer) if dtype == FLOAT16 else load_int8(b, pointer)


@contextmanager
def _case_per_count(b: ir.IRBuilder, count: ir.Value) -> Iterator[Iterator[int]]:
    """A switch: yields 1 to QUERIES, each while the builder is in the case of that count."""
    after = b.append_basic_block("counts_done")
    switch = b.switch(count, after)

    def cases() -> Iterator[int]:
        for n in range(1, QUERIES + 1):
            case = b.append_basic_block(f"count_{n}")
            switch.add_case(integer(n), case)
            b.position_at_end(case)
            yield n
            b.branch(after)

    yield cases()
    b.position_at_end(after)
