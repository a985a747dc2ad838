"""Tiles of matrix products: some panels of weights times some vectors, summed in registers."""

from itertools import product
from typing import Any

from llvmlite import ir
from numba import types

from tgen.engine.cpu import target
from tgen.engine.cpu.int8 import choose_dot
from tgen.engine.cpu.intrinsics import address, f32, i32, primitive
from tgen.engine.cpu.job_layout import (
    BFLOAT16,
    CACHE_LINE,
    FLOAT32,
    GROUP,
    GROUP_BYTES,
    INPUT_BYTES,
    INT8,
    LANES,
    PANEL,
    QUAD,
)
from tgen.engine.cpu.simd import (
    I8,
    I16,
    INTEGERS,
    VECTOR,
    broadcast,
    element,
    fma,
    integer,
    load,
    load_float16,
    loop,
    offset,
    prefetch,
    store,
)

_PREFETCH_BYTES = 2048  # from the weights in use to those that are fetched meanwhile
_MAX_PANELS = 4
_MAX_VECTORS = {FLOAT32: 12, BFLOAT16: 12, INT8: 8}


def tile_shapes(dtype: int) -> list[tuple[int, int]]:
    """Return the sizes of tiles, (vectors, panels): as many vectors as the registers have room for,
    and fewer for the rest.

    Each result needs a register, the weights of each panel one, and an input one. With int8, a
    result is two sums, and weights take three registers while they are multiplied.
    """
    n_registers, per_panel = target.vector_registers()
    per_result, per_weight = (2, 3) if dtype == INT8 else (1, 1)

    def room(n_vectors: int) -> int:
        spare = n_registers - per_result
        return min(_MAX_PANELS, spare // (per_panel * (per_result * n_vectors + per_weight)))

    most = max((n for n in range(1, _MAX_VECTORS[dtype] + 1) if room(n)), default=1)
    counts = {n for n in (1, 2, 4, 8) if n < most} | {most}
    sizes = {(n, p + 1) for n in counts for p in range(max(1, room(most)))}
    return sorted(sizes | {(1, p + 1) for p in range(room(1))})


def make_tile(dtype: int) -> Any:
    """tile(n_vectors, n_panels, w, w_step, x, x_step, n, out, out_step, add): out[m, r] = w[r] .
    x[m] for the rows of the panels, added to `out` if `add` is not 0.

    The steps are bytes from one panel, vector or row of `out` to the next; n counts groups.
    """
    emit = _emit_int8_tile if dtype == INT8 else _emit_float_tile

    @primitive(types.void(*[address] * 10))
    def tile(b, n_vectors, n_panels, w, w_step, x, x_step, n, out, out_step, add):
        after = b.append_basic_block("tile_done")
        switch = b.switch(b.add(b.mul(n_vectors, integer(8)), n_panels), after)
        for m, p in tile_shapes(dtype):
            case = b.append_basic_block(f"tile_{m}_{p}")
            switch.add_case(integer(8 * m + p), case)
            b.position_at_end(case)
            panels = [offset(b, w, w_step, i) for i in range(p)]
            vectors = [offset(b, x, x_step, i) for i in range(m)]
            results = iter(emit(b, dtype, panels, vectors, n))
            adds = b.icmp_signed("!=", add, integer(0))
            for i, k in product(range(m), range(p)):
                place = b.add(offset(b, out, out_step, i), integer(4 * PANEL * k))
                result, before = next(results), load(b, place, VECTOR)
                store(b, b.select(adds, b.fadd(before, result), result), place)
            b.branch(after)
        b.position_at_end(after)

    return tile


def make_read(dtype: int) -> Any:
    """read(panel, column, row): one weight of a panel as float32."""

    @primitive(types.float32(address, types.int64, types.int64))
    def read(b, panel, column, row):
        if dtype != INT8:
            weights = _load_column(b, panel, column, 4 if dtype == FLOAT32 else 2)
            return b.extract_element(weights, row)
        group = element(b, panel, b.sdiv(column, integer(GROUP)), GROUP_BYTES)
        column = b.srem(column, integer(GROUP))
        quad = element(b, group, b.sdiv(column, integer(QUAD)), QUAD * PANEL)
        place = b.add(element(b, quad, row, QUAD), b.srem(column, integer(QUAD)))
        number = b.sub(b.zext(load(b, place, I8), i32), ir.Constant(i32, 128))
        scale = b.extract_element(load_float16(b, b.add(group, integer(GROUP * PANEL))), row)
        return b.fmul(b.sitofp(number, f32), scale)

    return read


def _emit_float_tile(b, dtype, panels, vectors, n):
    """Return the results by vector and panel: each sums over the columns, one after the other."""
    size = 4 if dtype == FLOAT32 else 2
    step = 4 if len(vectors) == 1 else 1
    columns = b.mul(n, integer(GROUP))
    with loop(b, columns, len(panels) * len(vectors), step=step) as (j, sums, new_sums):
        new_sums += sums
        for column in range(step):
            i = b.add(j, integer(column)) if column else j
            weights = [_load_column(b, panel, i, size) for panel in panels]
            if len(vectors) > 1:
                _prefetch_columns(b, panels, i, size * PANEL)
            for m, vector in enumerate(vectors):
                number = broadcast(b, load(b, element(b, vector, i, 4), f32))
                for p, weight in enumerate(weights):
                    k = m * len(panels) + p
                    new_sums[k] = fma(b, weight, number, new_sums[k])
    return new_sums


def _prefetch_columns(b, panels, i, size):
    """Prefetch weights that tiles of several vectors, which are slower than RAM, use a little
    later."""
    for panel in panels:
        prefetch(b, b.add(element(b, panel, i, size), integer(_PREFETCH_BYTES)))


def _load_column(b, panel, i, size):
    """One column of a panel as float32. A bfloat16 is the upper half of a float32."""
    place = element(b, panel, i, size * PANEL)
    if size == 4:
        return load(b, place, VECTOR)
    upper = b.zext(load(b, place, ir.VectorType(I16, LANES)), INTEGERS)
    return b.bitcast(b.shl(upper, ir.Constant(INTEGERS, [16] * LANES)), VECTOR)


def _emit_int8_tile(b, _, panels, vectors, n):
    """Return the results by vector and panel: exact sums of each group, times its two scales."""
    dot = choose_dot()
    with loop(b, n, len(panels) * len(vectors), step=1) as (g, sums, new_sums):
        groups = [element(b, panel, g, GROUP_BYTES) for panel in panels]
        for group in groups if target.vector_registers()[1] == 1 else []:  # else sums are spilled
            for line in range(0, GROUP_BYTES, CACHE_LINE):
                prefetch(b, b.add(group, integer(_PREFETCH_BYTES + line)))
        inputs = [element(b, vector, g, INPUT_BYTES) for vector in vectors]
        starts = [load(b, b.add(x, integer(GROUP + 4)), i32) for x in inputs]
        totals = [broadcast(b, start) for start in starts for _ in groups]
        for quad in range(GROUP // QUAD):
            place = integer(quad * QUAD * PANEL)
            weights = [load(b, b.add(group, place), INTEGERS) for group in groups]
            for m, x in enumerate(inputs):
                numbers = broadcast(b, load(b, b.add(x, integer(quad * QUAD)), i32))
                for p, weight in enumerate(weights):
                    k = m * len(groups) + p
                    totals[k] = dot(b, totals[k], weight, numbers)
        scales = [load_float16(b, b.add(group, integer(GROUP * PANEL))) for group in groups]
        for m, x in enumerate(inputs):
            scale = broadcast(b, load(b, b.add(x, integer(GROUP)), f32))
            for p in range(len(groups)):
                k = m * len(groups) + p
                total = b.sitofp(totals[k], VECTOR)
                new_sums.append(fma(b, total, b.fmul(scales[p], scale), sums[k]))
    return new_sums
