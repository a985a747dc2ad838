"""Matrix products and their rounded inputs, norms, activations and attention on raw addresses.

A vector's result depends on that vector only, and its sums have one order: products add in the
order that `tiles` fixes, norms and softmax by lanes of 16 numbers. Nothing is compiled with
fastmath, so results depend neither on where a part of a vector begins nor on the width of the CPU's
vectors. Inputs of products are rounded like the weights.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir

from tgen.engine.cpu.amx import make_multiply, make_unpack, multiply_bfloat16
from tgen.engine.cpu.attention_tiles import (
    find_scale,
    make_scores,
    make_weighted_sum,
    multiply,
    store_float16,
    store_int8,
)
from tgen.engine.cpu.compiler import Parameter, compiled
from tgen.engine.cpu.intrinsics import (
    address,
    f32,
    i32,
    i64,
    load_float,
    load_int,
    primitive,
    store_float,
)
from tgen.engine.cpu.job_layout import (
    BFLOAT16,
    CACHE_LINE,
    FLOAT16,
    FLOAT32,
    GEGLU,
    GELU_TANH,
    GROUP,
    INPUT_BYTES,
    INT4,
    INT4_GROUP_BYTES,
    INT8,
    INT8_GROUP_BYTES,
    INT8_TILE_BYTES,
    INT8_TILES,
    LANES,
    PANEL,
    RELU,
    RELU2,
    SCALE,
    START,
    SWIGLU,
    TILE_BYTES,
    TILE_ROWS,
)
from tgen.engine.cpu.simd import (
    I8,
    I16,
    INTEGERS,
    VECTOR,
    exp,
    exp_scores,
    geglu,
    gelu_tanh,
    integer,
    integers,
    larger_integer,
    load,
    magnitude_bits,
    offset,
    reduce,
    relu,
    relu2,
    store,
    sum_of,
    swiglu,
    to_integers,
)
from tgen.engine.cpu.target import multiplies_bfloat16
from tgen.engine.cpu.tiles import make_read, make_tile, offset_factor, tile_shapes

# Machine code is compiled for one dtype of the inputs of products, unless they are tiles (FLOAT32,
# BFLOAT16 or INT8), and for one of the KV cache (FLOAT32, FLOAT16 or INT8).
INPUTS: Any = Parameter()
CACHE: Any = Parameter()
_PAIRS = multiplies_bfloat16()  # whether inputs in bfloat16 are stored as such, not as float32
_F = np.float32
_LOWEST = _F(-3e38)  # below all scores
_FLOAT_PANEL, _BFLOAT16_PANEL = 4 * GROUP * PANEL, 2 * GROUP * PANEL  # bytes of a group
_ALL = 1 << 40
_read_float32, _read_bfloat16, _read_int8 = (make_read(d) for d in (FLOAT32, BFLOAT16, INT8))


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


@primitive(address, address, address, i64)
def quantize_group(b, x, out, factors, step):
    """Write GROUP float32 numbers as an input of integer products: integers from -127 to 127; then
    at `factors`, and each `step` bytes after it, the scale, which is the largest magnitude / 127,
    where the sums of int8 products begin, and the rounded numbers' sum."""
    halves = [load(b, b.add(x, integer(4 * LANES * half)), VECTOR) for half in range(2)]
    one, two = (magnitude_bits(b, half) for half in halves)
    largest = b.bitcast(reduce(b, larger_integer(b, one, two), larger_integer), f32)
    is_zero = b.fcmp_ordered("==", largest, ir.Constant(f32, 0.0))
    inverse = b.fdiv(ir.Constant(f32, 127.0), b.select(is_zero, ir.Constant(f32, 1.0), largest))
    sums = None
    for half, numbers in enumerate(halves):
        rounded = to_integers(b, numbers, inverse)
        pointer = b.add(out, integer(LANES * half))
        store(b, b.trunc(rounded, ir.VectorType(I8, LANES)), pointer, align=1)
        sums = rounded if sums is None else b.add(sums, rounded)
    scale = b.fmul(largest, ir.Constant(f32, 1 / 127))
    total = reduce(b, sums, lambda b, x, y: b.add(x, y))
    start = b.mul(total, ir.Constant(i32, offset_factor()))
    for i, factor in enumerate((scale, start, b.fmul(scale, b.sitofp(total, f32)))):
        store(b, factor, offset(b, factors, step, i))


def _make_products(dtype, panel_bytes, input_bytes, groups_per_sum):
    """Products with weights of a dtype; the bytes are those of a panel and an input per group.

    After some groups, a new sum begins: it limits the rounding errors of float32, and without
    instructions for pairs, bfloat16 adds in AMX's order.
    """
    tile, shapes = make_tile(dtype), tile_shapes(dtype)
    most = max(n for n, _ in shapes)
    second = max((n for n, _ in shapes if n < most), default=1)
    single, several = (max(p for n, p in shapes if n == m) for m in (1, most))

    @compiled
    def products_of_dtype(w, first, last, n, x, n_vectors, out, out_step):
        n_groups, step = n // GROUP, out_step * 4
        w_step, x_step = n_groups * panel_bytes, n_groups * input_bytes
        panel, end = first // PANEL, (last + PANEL - 1) // PANEL
        while panel < end:
            n_panels = min(single if n_vectors == 1 else several, end - panel)
            i = 0
            while i < n_vectors:
                count = most
                while count > n_vectors - i:
                    count = second if count == most else count // 2
                target = out + i * step + panel * PANEL * 4
                g = 0
                while g < n_groups:
                    weights = w + panel * w_step + g * panel_bytes
                    vectors = x + i * x_step + g * input_bytes
                    size = min(groups_per_sum, n_groups - g)
                    tile(count, n_panels, weights, w_step, vectors, x_step, size, target, step, g)
                    g += size
                i += count
            panel += n_panels

    return products_of_dtype


_products_float32 = _make_products(FLOAT32, _FLOAT_PANEL, 4 * GROUP, 8)
_bfloat16_input, _bfloat16_groups = (2 * GROUP, 8) if _PAIRS else (4 * GROUP, 1)
_products_bfloat16 = _make_products(BFLOAT16, _BFLOAT16_PANEL, _bfloat16_input, _bfloat16_groups)
_products_int8 = _make_products(INT8, INT8_GROUP_BYTES, INPUT_BYTES, _ALL)
_products_int4 = _make_products(INT4, INT4_GROUP_BYTES, INPUT_BYTES, _ALL)


@compiled
def products(dtype, w, first, last, n, x, n_vectors, out, out_step):
    """out[i, r] = w[r] . x[i] for rows `first` to `last` of w and all vectors of x.

    `first` is a multiple of PANEL; so many rows are written that `last` is rounded up to one. Rows
    and vectors have n numbers, a multiple of GROUP; `out_step` counts numbers. Unless the dtype is
    float32, the vectors were made by `round_input`.
    """
    if INPUTS == FLOAT32:
        _products_float32(w, first, last, n, x, n_vectors, out, out_step)
    elif INPUTS == BFLOAT16:
        _products_bfloat16(w, first, last, n, x, n_vectors, out, out_step)
    elif dtype == INT8:
        _products_int8(w, first, last, n, x, n_vectors, out, out_step)
    else:
        _products_int4(w, first, last, n, x, n_vectors, out, out_step)


@compiled
def _products_of_bfloat16_tiles(w, first, last, n, x, n_vectors, out, out_step, scratch):
    step, w_step = out_step * 4, n // GROUP * TILE_BYTES
    panel, end = first // PANEL, (last + PANEL - 1) // PANEL
    while panel < end:
        n_panels = min(2, end - panel)
        for i in range(0, n_vectors, 2 * TILE_ROWS):
            count = min(2 * TILE_ROWS, n_vectors - i)
            n_blocks = (count + TILE_ROWS - 1) // TILE_ROWS
            is_whole = count == n_blocks * TILE_ROWS
            target = out + i * step + panel * PANEL * 4
            start, row = (target, step) if is_whole else (scratch, 2 * CACHE_LINE)
            tiles = x + i * n * 2
            multiply_bfloat16(
                n_blocks, n_panels, w + panel * w_step, w_step, tiles, n // GROUP, start, row
            )
            for m in range(0 if is_whole else count):
                for r in range(n_panels * PANEL):
                    store_float(target + m * step, r, load_float(scratch + m * row, r))
        panel += n_panels


def _make_products_of_tiles(dtype, group_bytes):
    unpack, multiply = make_unpack(dtype), make_multiply(dtype)

    @compiled
    def products_of_tiles(w, first, last, n, x, n_vectors, out, out_step, scratch):
        step, n_groups = out_step * 4, n // GROUP
        partial, unpacked = scratch + 2 * TILE_BYTES, scratch + 3 * TILE_BYTES
        for panel in range(first // PANEL, (last + PANEL - 1) // PANEL):
            weights = w + panel * n_groups * group_bytes
            unpack(weights, n_groups, unpacked)
            for i in range(0, n_vectors, TILE_ROWS):
                count = min(TILE_ROWS, n_vectors - i)
                target = out + i * step + panel * PANEL * 4
                start, row = (target, step) if count == TILE_ROWS else (partial, CACHE_LINE)
                tiles = x + i // TILE_ROWS * n_groups * INT8_TILE_BYTES
                multiply(weights, unpacked, tiles, n_groups, start, row, scratch)
                for m in range(0 if count == TILE_ROWS else count):
                    for r in range(PANEL):
                        store_float(target + m * step, r, load_float(partial + m * row, r))

    return products_of_tiles


_products_of_int8_tiles = _make_products_of_tiles(INT8, INT8_GROUP_BYTES)
_products_of_int4_tiles = _make_products_of_tiles(INT4, INT4_GROUP_BYTES)


@compiled
def products_of_tiles(dtype, w, first, last, n, x, n_vectors, out, out_step, scratch):
    """`products` of inputs that are tiles; `scratch` has room for 4 tiles and PANEL * n bytes."""
    if INPUTS == BFLOAT16:
        _products_of_bfloat16_tiles(w, first, last, n, x, n_vectors, out, out_step, scratch)
    elif dtype == INT8:
        _products_of_int8_tiles(w, first, last, n, x, n_vectors, out, out_step, scratch)
    else:
        _products_of_int4_tiles(w, first, last, n, x, n_vectors, out, out_step, scratch)


@compiled
def embed(w, row, n, n_padded, out):
    """out = the first n numbers of row `row` of w, whose rows have `n_padded` numbers."""
    panel, r = row // PANEL * (n_padded // GROUP), row % PANEL
    if INPUTS == FLOAT32:
        for j in range(n):
            store_float(out, j, _read_float32(w + panel * _FLOAT_PANEL, j, r))
    elif INPUTS == BFLOAT16:
        for j in range(n):
            store_float(out, j, _read_bfloat16(w + panel * _BFLOAT16_PANEL, j, r))
    else:
        for j in range(n):
            store_float(out, j, _read_int8(w + panel * INT8_GROUP_BYTES, j, r))


@compiled
def round_input(dtype, x, n, out, i, first, width):
    """Write n numbers, rounded up to whole groups, as those of input i from number `first` on.

    Inputs have `width` numbers; their dtype is INPUTS, or that of tiles, see `job_layout`.
    """
    group, groups, n_groups = first // GROUP, (n + GROUP - 1) // GROUP, width // GROUP
    if INPUTS == BFLOAT16 and dtype == BFLOAT16 and _PAIRS:
        start = out + (i * width + first) * 2
        for g in range(groups):
            pack_bfloat16(x + g * GROUP * 4, start + g * GROUP * 2)
    elif INPUTS == BFLOAT16 and dtype == BFLOAT16:
        start = out + (i * width + first) * 4
        for j in range(0, groups * GROUP, LANES):
            round_to_bfloat16(x + j * 4, start + j * 4)
    elif INPUTS == BFLOAT16:
        tiles = out + (i // TILE_ROWS * n_groups + group) * TILE_BYTES
        start = tiles + i % TILE_ROWS * CACHE_LINE
        for g in range(groups):
            pack_bfloat16(x + g * GROUP * 4, start + g * TILE_BYTES)
    elif dtype == INT8_TILES:
        tiles = out + (i // TILE_ROWS * n_groups + group) * INT8_TILE_BYTES
        for g in range(groups):
            start = tiles + g * INT8_TILE_BYTES
            numbers, factors = start + i % TILE_ROWS * GROUP, start + TILE_ROWS * GROUP
            quantize_group(x + g * GROUP * 4, numbers, factors + i % TILE_ROWS * 4, CACHE_LINE)
    else:
        for g in range(groups):
            start = out + (i * n_groups + group + g) * INPUT_BYTES
            quantize_group(x + g * GROUP * 4, start, start + SCALE, START - SCALE)


@compiled
def rms_norm(x, weight, n, count, eps, out):
    """out = x / rms(x) * weight, over n numbers, of which all but `count` are padding zeros."""
    mean = sum_of(x, n, _F(0), True) / _F(count)
    scale = _F(1) / _F(math.sqrt(mean + eps))
    for j in range(n):
        store_float(out, j, load_float(x, j) * scale * load_float(weight, j))


@compiled
def layer_norm(x, weight, bias, n, eps, out):
    """out = (x - mean) / deviation * weight + bias, over n numbers."""
    mean = sum_of(x, n, _F(0), False) / _F(n)
    variance = sum_of(x, n, mean, True) / _F(n)
    scale = _F(1) / _F(math.sqrt(variance + eps))
    for j in range(n):
        value = (load_float(x, j) - mean) * scale
        store_float(out, j, value * load_float(weight, j) + load_float(bias, j))


@compiled
def add_row(out, other, bias, first, last):
    """out[r] += other[r] + bias[r] for r from `first` to `last`; address 0 is skipped."""
    if other != 0:
        for r in range(first, last):
            store_float(out, r, load_float(out, r) + load_float(other, r))
    if bias != 0:
        for r in range(first, last):
            store_float(out, r, load_float(out, r) + load_float(bias, r))


@compiled
def scale_row(out, scale, first, last):
    """out[r] *= scale for r from `first` to `last`."""
    for r in range(first, last):
        store_float(out, r, load_float(out, r) * scale)


@compiled
def activate(kind, up, gate, n):
    """up[r] = activation(up[r]), or activation(gate[r]) * up[r], for n numbers, rounded up to whole
    vectors."""
    if kind == SWIGLU:
        swiglu(up, gate, n)
    elif kind == RELU:
        relu(up, up, n)
    elif kind == GELU_TANH:
        gelu_tanh(up, up, n)
    elif kind == GEGLU:
        geglu(up, gate, n)
    elif kind == RELU2:
        relu2(up, up, n)
    else:
        for r in range(n):
            z = load_float(up, r)
            store_float(up, r, z * _F(0.5) * (_F(1) + _F(math.erf(z * _F(0.7071067812)))))


@compiled
def rotate(vector, cos, sin, half):
    """Rotate each pair (x_i, x_{i + half}) by the angle with this cosine and sine."""
    for d in range(half):
        x, y = load_float(vector, d), load_float(vector, d + half)
        c, s = load_float(cos, d), load_float(sin, d)
        store_float(vector, d, x * c - y * s)
        store_float(vector, d + half, y * c + x * s)


def _make_attend(dtype, n_bytes):
    """`attend` for keys and values of a dtype, which has so many bytes."""
    score_64, score_16 = make_scores(4, dtype), make_scores(1, dtype)
    weighted_sum_32, weighted_sum_64 = make_weighted_sum(2, dtype), make_weighted_sum(4, dtype)

    @compiled
    def attend_to(count, queries, limits, keys, values, scales, n, size, scale, scores, out):
        step, out_step = size * n_bytes, (size + LANES) * 4
        if n == 0:
            for m in range(count):
                for d in range(size + 2):
                    store_float(out + m * out_step, d, _LOWEST if d == size else _F(0))
            return
        scores_step = (n + 63) // 64 * 64 * 4
        s = 0
        while s < n:
            if n - s > 48:
                score_64(count, queries, keys + s * step, size, scores + s * 4, scores_step)
                s += 64
            else:
                score_16(count, queries, keys + s * step, size, scores + s * 4, scores_step)
                s += 16
        for m in range(count):
            first, end = load_int(limits, 2 * m), load_int(limits, 2 * m + 1)
            row, statistics = scores + m * scores_step, out + m * out_step + size * 4
            if dtype == INT8:
                multiply(row, load_int(scales, 0), n)
            exp_scores(row, first, end, n, scale, statistics)
            if dtype == INT8:
                multiply(row, load_int(scales, 1), n)
        d = 0
        while d < size:
            target, v = out + d * 4, values + d * n_bytes
            if size - d >= 64:
                weighted_sum_64(count, scores, scores_step, v, step, n, target, out_step)
                d += 64
            else:
                weighted_sum_32(count, scores, scores_step, v, step, n, target, out_step)
                d += 32

    return attend_to


_attend_float32, _attend_float16 = _make_attend(FLOAT32, 4), _make_attend(FLOAT16, 2)
_attend_int8 = _make_attend(INT8, 1)


@compiled
def attend(count, queries, limits, keys, values, scales, n, size, scale, scores, out):
    """out[m] = sum of e^(scale * (score[m, s] - maximum[m])) * value[s], score[m, s] = query m .
    key s, for n positions s and `count` queries, at most QUERIES, whose addresses are at `queries`.

    `limits` has the first position and the end of each query. A row of `out` has `size` numbers,
    then the maximum, the sum without values, and room up to size + LANES. `size`, the padded head
    size, is a multiple of GROUP. Keys are laid out as in `make_scores`; those after the last
    position are ignored. Keys and values in int8 have a scale per position: `scales` has the two
    addresses. A query's result does not depend on the others: outside its limits, zeros
    are added.
    """
    if CACHE == FLOAT32:
        _attend_float32(count, queries, limits, keys, values, scales, n, size, scale, scores, out)
    elif CACHE == FLOAT16:
        _attend_float16(count, queries, limits, keys, values, scales, n, size, scale, scores, out)
    else:
        _attend_int8(count, queries, limits, keys, values, scales, n, size, scale, scores, out)


@compiled
def merge(rows, n_rows, size, scale, out):
    """out = attention to all ranges of keys, of which `attend` wrote one row each."""
    step, maximum, total = (size + LANES) * 4, _LOWEST, _F(0)
    for r in range(n_rows):
        maximum = max(maximum, load_float(rows + r * step, size))
    for d in range(size):
        store_float(out, d, _F(0))
    for r in range(n_rows):
        row = rows + r * step
        factor = exp((load_float(row, size) - maximum) * scale)
        total += factor * load_float(row, size + 1)
        for d in range(size):
            store_float(out, d, load_float(out, d) + factor * load_float(row, d))
    scale_row(out, _F(1) / total, 0, size)


@compiled
def store_cached(base, i, vector, n, step, scale):
    """Store the n numbers of a vector, in whole vectors, as numbers i, i + step, ... of the KV
    cache's dtype after the address, and the scale of int8 numbers at the address `scale`."""
    if CACHE == FLOAT32:
        for j in range(n):
            store_float(base, i + j * step, load_float(vector, j))
    elif CACHE == FLOAT16:
        for j in range(0, n, LANES):
            store_float16(base, i + j * step, vector + j * 4, step)
    else:
        store_float(scale, 0, find_scale(vector, n))
        inverse = _F(1) / load_float(scale, 0) if load_float(scale, 0) != 0 else _F(0)
        for j in range(0, n, LANES):
            store_int8(base, i + j * step, vector + j * 4, step, inverse)
