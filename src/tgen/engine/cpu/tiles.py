"""Tiles of matrix products: some panels of weights times some vectors, summed in registers.

Small integers are multiplied exactly, by the instructions that the CPU has.
"""

from functools import partial
from itertools import product
from typing import Any

from llvmlite import ir

from tgen.engine.cpu import target
from tgen.engine.cpu.intrinsics import address, declare, f32, i32, i64, primitive
from tgen.engine.cpu.job_layout import (
    BFLOAT16,
    CACHE_LINE,
    FLOAT32,
    GROUP,
    INPUT_BYTES,
    INT4,
    INT4_GROUP_BYTES,
    INT8,
    INT8_GROUP_BYTES,
    LANES,
    PANEL,
    QUAD,
    SCALE,
    START,
    SUM,
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
    integers,
    load,
    load_float16,
    loop,
    offset,
    prefetch,
    store,
)

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


GROUP_BYTES = {INT8: INT8_GROUP_BYTES, INT4: INT4_GROUP_BYTES}
_PREFETCH_BYTES = 2048  # from the weights in use to those that are fetched meanwhile
_MAX_PANELS = 4
_MAX_VECTORS = {FLOAT32: 12, BFLOAT16: 12, INT8: 8, INT4: 8}
# Registers of a result, and of a panel's weights while they are multiplied.
_REGISTERS = {FLOAT32: (1, 1), BFLOAT16: (2, 2), INT8: (2, 3), INT4: (2, 3)}
_REGISTERS_OF_PAIRS = (1, 1)  # of bfloat16, see `target.multiplies_bfloat16`


def tile_shapes(dtype: int) -> list[tuple[int, int]]:
    """Return the sizes of tiles, (vectors, panels): as many vectors as the registers have room for,
    and fewer for the rest; an input takes a register, too."""
    n_registers, per_panel = target.vector_registers()
    in_pairs = dtype == BFLOAT16 and target.multiplies_bfloat16()
    per_result, per_weight = _REGISTERS_OF_PAIRS if in_pairs else _REGISTERS[dtype]

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
    emit = EMIT[dtype]

    @primitive(*[address] * 10)
    def tile(b, n_vectors, n_panels, w, w_step, x, x_step, n, out, out_step, add):
        after = b.append_basic_block("tile_done")
        switch = b.switch(b.add(b.mul(n_vectors, integer(8)), n_panels), after)
        for m, p in tile_shapes(dtype):
            case = b.append_basic_block(f"tile_{m}_{p}")
            switch.add_case(integer(8 * m + p), case)
            b.position_at_end(case)
            panels = [offset(b, w, w_step, i) for i in range(p)]
            vectors = [offset(b, x, x_step, i) for i in range(m)]
            results = iter(emit(b, panels, vectors, n))
            adds = b.icmp_signed("!=", add, integer(0))
            for i, k in product(range(m), range(p)):
                pointer = b.add(offset(b, out, out_step, i), integer(4 * PANEL * k))
                result, before = next(results), load(b, pointer, VECTOR)
                store(b, b.select(adds, b.fadd(before, result), result), pointer)
            b.branch(after)
        b.position_at_end(after)

    return tile


def make_read(dtype: int) -> Any:
    """read(panel, column, row): one weight of a panel as float32; not for int4."""

    @primitive(address, i64, i64)
    def read(b, panel, column, row):
        if dtype == FLOAT32:
            return load(b, element(b, element(b, panel, column, 4 * PANEL), row, 4), f32)
        if dtype == BFLOAT16:
            pair = element(b, element(b, panel, b.sdiv(column, integer(2)), 4 * PANEL), row, 4)
            bits = load(b, element(b, pair, b.srem(column, integer(2)), 2), I16)
            return b.bitcast(b.shl(b.zext(bits, i32), ir.Constant(i32, 16)), f32)
        group = element(b, panel, b.sdiv(column, integer(GROUP)), INT8_GROUP_BYTES)
        column = b.srem(column, integer(GROUP))
        quad = element(b, group, b.sdiv(column, integer(QUAD)), QUAD * PANEL)
        pointer = b.add(element(b, quad, row, QUAD), b.srem(column, integer(QUAD)))
        number = b.sub(b.zext(load(b, pointer, I8), i32), ir.Constant(i32, 128))
        scale = b.extract_element(load_float16(b, b.add(group, integer(GROUP * PANEL))), row)
        return b.fmul(b.sitofp(number, f32), scale)

    return read


def _emit_float32(b, panels, vectors, n):
    """Return the results by vector and panel: each sums over the columns, one after the other."""
    step = 4 if len(vectors) == 1 else 1
    columns = b.mul(n, integer(GROUP))
    with loop(b, columns, len(panels) * len(vectors), step=step) as (j, sums, new_sums):
        new_sums += sums
        for column in range(step):
            i = b.add(j, integer(column)) if column else j
            pointers = _prefetched(b, panels, i, 4 * PANEL, len(vectors))
            weights = [load(b, pointer, VECTOR) for pointer in pointers]
            for m, vector in enumerate(vectors):
                number = broadcast(b, load(b, element(b, vector, i, 4), f32))
                for p, weight in enumerate(weights):
                    k = m * len(panels) + p
                    new_sums[k] = fma(b, weight, number, new_sums[k])
    return new_sums


def _emit_pairs(b, panels, vectors, n):
    """Return the results by vector and panel: each sums over the pairs of columns."""
    kind = ir.FunctionType(VECTOR, [VECTOR, INTEGERS, INTEGERS])
    dot = declare(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    pairs = b.mul(n, integer(GROUP // 2))
    with loop(b, pairs, len(panels) * len(vectors), step=1) as (j, sums, new_sums):
        pointers = _prefetched(b, panels, j, 4 * PANEL, len(vectors))
        weights = [load(b, pointer, INTEGERS) for pointer in pointers]
        for vector in vectors:
            pair = broadcast(b, load(b, element(b, vector, j, 4), i32))
            for weight in weights:
                new_sums.append(b.call(dot, [sums[len(new_sums)], weight, pair]))
    return new_sums


def _emit_bfloat16(b, panels, vectors, n):
    """Return the results by vector and panel: each is the sum over the even columns plus the sum
    over the odd ones, as AMX adds them; or a sum over pairs of columns, if the CPU has that."""
    if target.multiplies_bfloat16():
        return _emit_pairs(b, panels, vectors, n)
    pairs, n_results = b.mul(n, integer(GROUP // 2)), len(panels) * len(vectors)
    with loop(b, pairs, 2 * n_results, step=1) as (j, sums, new_sums):
        new_sums += sums
        pointers = _prefetched(b, panels, j, 4 * PANEL, len(vectors))
        columns = [load(b, pointer, INTEGERS) for pointer in pointers]
        # A bfloat16 is the upper half of a float32.
        even = [b.bitcast(b.shl(one, integers(16)), VECTOR) for one in columns]
        odd = [b.bitcast(b.and_(one, integers(-1 << 16)), VECTOR) for one in columns]
        for m, vector in enumerate(vectors):
            pair = element(b, vector, j, 8)
            for half, weights in enumerate((even, odd)):
                number = broadcast(b, load(b, b.add(pair, integer(4 * half)), f32))
                for p, weight in enumerate(weights):
                    k = half * n_results + m * len(panels) + p
                    new_sums[k] = fma(b, weight, number, new_sums[k])
    halves = zip(new_sums[:n_results], new_sums[n_results:], strict=True)
    return [b.fadd(even, odd) for even, odd in halves]


def _prefetched(b, panels, i, size, n_vectors):
    """The addresses of line i of each panel. Weights that follow are prefetched in tiles of several
    vectors, which are slower than RAM."""
    pointers = [element(b, panel, i, size) for panel in panels]
    for pointer in pointers if n_vectors > 1 else []:
        prefetch(b, b.add(pointer, integer(_PREFETCH_BYTES)))
    return pointers


def _emit_integers(b, panels, vectors, n, *, dtype):
    """Return the results by vector and panel: exact sums of each group, times its two scales; for
    int4, plus the minimum times the sum of the inputs."""
    dot, n_bytes = choose_dot(dtype), GROUP_BYTES[dtype]
    with loop(b, n, len(panels) * len(vectors), step=1) as (g, sums, new_sums):
        groups = [element(b, panel, g, n_bytes) for panel in panels]
        for group in groups if target.vector_registers()[1] == 1 else []:  # else sums are spilled
            for line in range(0, n_bytes, CACHE_LINE):
                prefetch(b, b.add(group, integer(_PREFETCH_BYTES + line)))
        inputs = [element(b, vector, g, INPUT_BYTES) for vector in vectors]
        starts = [_load_input(b, x, START, i32) if dtype == INT8 else integers(0) for x in inputs]
        totals = [start for start in starts for _ in groups]
        for quad, weights in load_quads(b, groups, dtype):
            for m, x in enumerate(inputs):
                numbers = _load_input(b, x, QUAD * quad, i32)
                for p, weight in enumerate(weights):
                    k = m * len(groups) + p
                    totals[k] = dot(b, totals[k], weight, numbers)
        after = integer(GROUP * PANEL if dtype == INT8 else GROUP * PANEL // 2)
        factors = [b.add(group, after) for group in groups]
        scales = [load_float16(b, factor) for factor in factors]
        for m, x in enumerate(inputs):
            scale = _load_input(b, x, SCALE, f32)
            for p in range(len(groups)):
                k = m * len(groups) + p
                total = b.sitofp(totals[k], VECTOR)
                new_sums.append(fma(b, total, b.fmul(scales[p], scale), sums[k]))
        if dtype == INT4:
            minima = [load_float16(b, b.add(factor, integer(2 * PANEL))) for factor in factors]
            for m, x in enumerate(inputs):
                total = _load_input(b, x, SUM, f32)
                for p, minimum in enumerate(minima):
                    k = m * len(groups) + p
                    new_sums[k] = fma(b, minimum, total, new_sums[k])
    return new_sums


def _load_input(b, x, at, kind):
    """A number of the group of an input, in all lanes."""
    return broadcast(b, load(b, b.add(x, integer(at)), kind))


def load_quads(b, groups, dtype):
    """Yield the number of each four columns of a group, and their weights in each panel."""
    for line in range(GROUP // QUAD // (2 if dtype == INT4 else 1)):
        weights = [load(b, b.add(group, integer(CACHE_LINE * line)), INTEGERS) for group in groups]
        if dtype == INT8:
            yield line, weights
            continue
        for half in range(2):
            shifted = [b.lshr(weight, integers(4 * half)) for weight in weights]
            yield 2 * line + half, [b.and_(one, integers(0x0F0F0F0F)) for one in shifted]


EMIT: dict[int, Any] = {
    FLOAT32: _emit_float32,
    BFLOAT16: _emit_bfloat16,
    INT8: partial(_emit_integers, dtype=INT8),
    INT4: partial(_emit_integers, dtype=INT4),
}
