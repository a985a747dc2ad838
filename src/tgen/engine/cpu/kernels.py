"""Matrix products, norms, activations and attention on raw addresses.

A vector's result depends on that vector only. Dot products add in the order that `simd` fixes.
Other sums run over a whole vector; only they use fastmath, whose order follows from the length.
Functions that run over parts of a vector avoid fastmath: results do not depend on where a part
begins.
"""

import math

import numpy as np
from numba import njit

from tgen.engine.cpu.intrinsics import bits_to_float, load_float, store_float
from tgen.engine.cpu.job_layout import (
    BFLOAT16,
    FLOAT32,
    GEGLU,
    GELU_TANH,
    GROUP,
    GROUP_BYTES,
    INT8,
    RELU,
    SWIGLU,
)
from tgen.engine.cpu.simd import make_mix, make_scores, make_tile

_score_64, _score_16 = make_scores(4), make_scores(1)
_mix_32, _mix_64 = make_mix(2), make_mix(4)

_F = np.float32
_MAX_EXPONENT = _F(87.0)  # exp overflows float32 beyond it, and is almost 0 below its negative
_ROUNDING = _F(3 << 22)  # adding and subtracting it rounds to an integer


@njit(inline="always")
def exp(x):
    """e^x in float32, accurate to 2 ulp (Cephes' expf)."""
    x = min(max(x, -_MAX_EXPONENT), _MAX_EXPONENT)
    k = x * _F(1.44269504) + _ROUNDING - _ROUNDING
    r = x - k * _F(0.693359375)
    r = r - k * _F(-2.12194440e-4)
    p = _F(1.9875691500e-4)
    p = p * r + _F(1.3981999507e-3)
    p = p * r + _F(8.3334519073e-3)
    p = p * r + _F(4.1665795894e-2)
    p = p * r + _F(1.6666665459e-1)
    p = p * r + _F(5.0000001201e-1)
    p = p * r * r + r + _F(1.0)
    return p * bits_to_float(np.int32((np.int32(k) + np.int32(127)) << np.int32(23)))


def _make_products(dtype, row_bytes):
    """Products with weights of a dtype: `row_bytes` per GROUP numbers of a row.

    A tile has as many results as fit in registers beside its input; the fewer vectors, the more
    rows of weights.
    """
    # int8 weights need registers for the conversion to float32.
    rows_per_tile = {1: 8, 2: 8, 3: 4, 4: 4} | ({} if dtype == INT8 else {5: 4, 6: 4})
    tile, single = make_tile(rows_per_tile, dtype), make_tile({1: 1}, dtype)
    max_vectors = max(rows_per_tile)

    @njit
    def products_of_dtype(w, first, last, n, x, n_vectors, out, out_step):
        w_step, x_step, step = n // GROUP * row_bytes, n * 4, out_step * 4
        i = 0
        while i < n_vectors:
            left = n_vectors - i
            count = -(-left // -(-left // max_vectors))  # few groups of similar size
            rows = 8 if count <= 2 else 4  # as in rows_per_tile
            vectors, r = x + i * x_step, first
            while r + rows <= last:
                target = out + i * step + r * 4
                tile(count, w + r * w_step, w_step, vectors, x_step, n, target, step)
                r += rows
            for rest in range(r, last):
                for m in range(count):
                    weights, vector = w + rest * w_step, vectors + m * x_step
                    target = out + (i + m) * step + rest * 4
                    single(1, weights, w_step, vector, x_step, n, target, step)
            i += count

    return products_of_dtype


_products_float32 = _make_products(FLOAT32, 4 * GROUP)
_products_bfloat16 = _make_products(BFLOAT16, 2 * GROUP)
_products_int8 = _make_products(INT8, GROUP_BYTES)


@njit
def products(dtype, w, first, last, n, x, n_vectors, out, out_step):
    """out[i, r] = w[r] . x[i] for rows `first` to `last` of w and all vectors of x.

    Rows and vectors have n numbers, a multiple of GROUP; `out_step` counts numbers.
    """
    if dtype == FLOAT32:
        _products_float32(w, first, last, n, x, n_vectors, out, out_step)
    elif dtype == BFLOAT16:
        _products_bfloat16(w, first, last, n, x, n_vectors, out, out_step)
    else:
        _products_int8(w, first, last, n, x, n_vectors, out, out_step)


@njit(fastmath=True)
def rms_norm(x, weight, n, count, eps, out):
    """out = x / rms(x) * weight, over n numbers, of which all but `count` are padding zeros."""
    total = _F(0)
    for j in range(n):
        value = load_float(x, j)
        total += value * value
    scale = _F(1) / _F(math.sqrt(total / _F(count) + eps))
    for j in range(n):
        store_float(out, j, load_float(x, j) * scale * load_float(weight, j))


@njit(fastmath=True)
def layer_norm(x, weight, bias, n, eps, out):
    """out = (x - mean) / deviation * weight + bias, over n numbers."""
    total = _F(0)
    for j in range(n):
        total += load_float(x, j)
    mean = total / _F(n)
    total = _F(0)
    for j in range(n):
        value = load_float(x, j) - mean
        total += value * value
    scale = _F(1) / _F(math.sqrt(total / _F(n) + eps))
    for j in range(n):
        value = (load_float(x, j) - mean) * scale
        store_float(out, j, value * load_float(weight, j) + load_float(bias, j))


@njit
def add_row(out, other, bias, first, last):
    """out[r] += other[r] + bias[r] for r from `first` to `last`; address 0 is skipped."""
    if other != 0:
        for r in range(first, last):
            store_float(out, r, load_float(out, r) + load_float(other, r))
    if bias != 0:
        for r in range(first, last):
            store_float(out, r, load_float(out, r) + load_float(bias, r))


@njit
def scale_row(out, scale, first, last):
    """out[r] *= scale for r from `first` to `last`."""
    for r in range(first, last):
        store_float(out, r, load_float(out, r) * scale)


@njit(inline="always")
def _gelu_tanh(z):
    inner = _F(1.5957691216) * (z + _F(0.044715) * z * z * z)
    return z / (_F(1) + exp(-inner))


@njit
def activate(kind, up, gate, first, last):
    """up[r] = activation(up[r]), or activation(gate[r]) * up[r], for r from `first` to `last`."""
    if kind == SWIGLU:
        for r in range(first, last):
            z = load_float(gate, r)
            store_float(up, r, load_float(up, r) * z / (_F(1) + exp(-z)))
    elif kind == RELU:
        for r in range(first, last):
            store_float(up, r, max(load_float(up, r), _F(0)))
    elif kind == GELU_TANH:
        for r in range(first, last):
            store_float(up, r, _gelu_tanh(load_float(up, r)))
    elif kind == GEGLU:
        for r in range(first, last):
            store_float(up, r, load_float(up, r) * _gelu_tanh(load_float(gate, r)))
    else:
        for r in range(first, last):
            z = load_float(up, r)
            store_float(up, r, z * _F(0.5) * (_F(1) + _F(math.erf(z * _F(0.7071067812)))))


@njit
def rotate(vector, cos, sin, half):
    """Rotate each pair (x_i, x_{i + half}) by the angle with this cosine and sine."""
    for d in range(half):
        x, y = load_float(vector, d), load_float(vector, d + half)
        c, s = load_float(cos, d), load_float(sin, d)
        store_float(vector, d, x * c - y * s)
        store_float(vector, d + half, y * c + x * s)


@njit(fastmath=True)
def _maximum(x, n):
    largest = load_float(x, 0)
    for j in range(n):
        largest = max(largest, load_float(x, j))
    return largest


@njit(fastmath=True)
def _sum(x, n):
    total = _F(0)
    for j in range(n):
        total += load_float(x, j)
    return total


@njit
def attend(query, keys, values, first, n, size, scale, scores, out):
    """out = softmax(scale * keys query) values, over positions `first` (below LANES) to n.

    `size`, the padded head size, is a multiple of GROUP. Keys are laid out as in `make_scores`;
    those after the last position are ignored.
    """
    step = size * 4
    s = 0
    while s < n:
        if n - s > 48:
            _score_64(query, keys + s * step, size, scores + s * 4)
            s += 64
        else:
            _score_16(query, keys + s * step, size, scores + s * 4)
            s += 16
    scores, values, n = scores + first * 4, values + first * step, n - first
    largest = _maximum(scores, n)
    for s in range(n):
        store_float(scores, s, exp((load_float(scores, s) - largest) * scale))
    total = _sum(scores, n)
    d = 0
    while d < size:
        if size - d >= 64:
            _mix_64(scores, values + d * 4, step, n, out + d * 4)
            d += 64
        else:
            _mix_32(scores, values + d * 4, step, n, out + d * 4)
            d += 32
    for d in range(size):
        store_float(out, d, load_float(out, d) / total)
