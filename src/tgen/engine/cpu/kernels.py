"""What a pass is made of: products, norms, activations and attention, on plain addresses.

A row's result depends on that row alone: every dot product adds in the order that `lanes` fixes,
every other sum runs over one whole row. Only those are compiled with fastmath, which lets them use
vectors in an order that follows from the length. What runs over parts of a row is compiled without,
so that a number comes out the same wherever a part begins.
"""

import math

import numpy as np
from numba import njit

from tgen.engine.cpu.job_layout import (
    BFLOAT16,
    FLOAT32,
    GELU_TANH,
    GROUP,
    GROUP_BYTES,
    INT8,
    RELU,
    SWIGLU,
)
from tgen.engine.cpu.simd import (
    float_at,
    float_of_bits,
    make_mix,
    make_scores,
    make_tile,
    put_float,
)

_score_64, _score_16 = make_scores(4), make_scores(1)
_mix_32, _mix_64 = make_mix(2), make_mix(4)

_F = np.float32
_NOT_FAR = _F(87.0)  # exp of more is not a float32, of less than its negative almost 0
_ROUND = _F(3 << 22)  # added and taken away, it leaves a whole number


@njit(inline="always")
def exp(x):
    """e^x in float32, to two units of the last place (Cephes' expf)."""
    x = min(max(x, -_NOT_FAR), _NOT_FAR)
    k = x * _F(1.44269504) + _ROUND - _ROUND
    r = x - k * _F(0.693359375)
    r = r - k * _F(-2.12194440e-4)
    p = _F(1.9875691500e-4)
    p = p * r + _F(1.3981999507e-3)
    p = p * r + _F(8.3334519073e-3)
    p = p * r + _F(4.1665795894e-2)
    p = p * r + _F(1.6666665459e-1)
    p = p * r + _F(5.0000001201e-1)
    p = p * r * r + r + _F(1.0)
    return p * float_of_bits(np.int32((np.int32(k) + np.int32(127)) << np.int32(23)))


def _make_products(stored, row_bytes):
    """Products with weights that are stored so: `row_bytes` of them for every GROUP of a row.

    Tiles have as many results as registers can hold beside their input; the fewer vectors, the
    more rows of weights.
    """
    single, one, two = (make_tile(rows, n, stored) for rows, n in ((1, 1), (8, 1), (8, 2)))
    three, four, five, six = (make_tile(4, n, stored) for n in (3, 4, 5, 6))
    most = 4 if stored == INT8 else 6  # int8 needs registers to become float32

    @njit
    def some_products(w, first, last, n, x, n_vectors, out, out_step):
        w_step, x_step, step = n // GROUP * row_bytes, n * 4, out_step * 4
        i = 0
        while i < n_vectors:
            left = n_vectors - i
            taken = -(-left // -(-left // most))  # as few turns as can be, alike in size
            rows = 8 if taken <= 2 else 4
            vectors, r = x + i * x_step, first
            while r + rows <= last:
                weights, place = w + r * w_step, out + i * step + r * 4
                if taken == 1:
                    one(weights, w_step, vectors, x_step, n, place, step)
                elif taken == 2:
                    two(weights, w_step, vectors, x_step, n, place, step)
                elif taken == 3:
                    three(weights, w_step, vectors, x_step, n, place, step)
                elif taken == 4:
                    four(weights, w_step, vectors, x_step, n, place, step)
                elif taken == 5:
                    five(weights, w_step, vectors, x_step, n, place, step)
                else:
                    six(weights, w_step, vectors, x_step, n, place, step)
                r += rows
            for rest in range(r, last):
                for m in range(taken):
                    weights, vector = w + rest * w_step, vectors + m * x_step
                    place = out + (i + m) * step + rest * 4
                    single(weights, w_step, vector, x_step, n, place, step)
            i += taken

    return some_products


_with_float32 = _make_products(FLOAT32, 4 * GROUP)
_with_bfloat16 = _make_products(BFLOAT16, 2 * GROUP)
_with_int8 = _make_products(INT8, GROUP_BYTES)


@njit
def products(stored, w, first, last, n, x, n_vectors, out, out_step):
    """out[i, r] = w[r] . x[i] for the rows `first` to `last` of w and all vectors.

    Both have n numbers a row, a multiple of GROUP; `out_step` is in numbers.
    """
    if stored == FLOAT32:
        _with_float32(w, first, last, n, x, n_vectors, out, out_step)
    elif stored == BFLOAT16:
        _with_bfloat16(w, first, last, n, x, n_vectors, out, out_step)
    else:
        _with_int8(w, first, last, n, x, n_vectors, out, out_step)


@njit(fastmath=True)
def rms_norm(x, weight, n, eps, out):
    """out = x / rms(x) * weight, over n numbers."""
    total = _F(0)
    for j in range(n):
        value = float_at(x, j)
        total += value * value
    scale = _F(1) / _F(math.sqrt(total / _F(n) + eps))
    for j in range(n):
        put_float(out, j, float_at(x, j) * scale * float_at(weight, j))


@njit(fastmath=True)
def layer_norm(x, weight, bias, n, eps, out):
    """out = (x - mean) / deviation * weight + bias, over n numbers."""
    total = _F(0)
    for j in range(n):
        total += float_at(x, j)
    mean = total / _F(n)
    total = _F(0)
    for j in range(n):
        value = float_at(x, j) - mean
        total += value * value
    scale = _F(1) / _F(math.sqrt(total / _F(n) + eps))
    for j in range(n):
        value = (float_at(x, j) - mean) * scale
        put_float(out, j, value * float_at(weight, j) + float_at(bias, j))


@njit
def add_row(out, other, bias, first, last):
    """out[r] += other[r] + bias[r] for r from `first` to `last`; an address of 0 is left out."""
    if other != 0:
        for r in range(first, last):
            put_float(out, r, float_at(out, r) + float_at(other, r))
    if bias != 0:
        for r in range(first, last):
            put_float(out, r, float_at(out, r) + float_at(bias, r))


@njit
def activate(kind, up, gate, first, last):
    """up[r] = activation(up[r]), or silu(gate[r]) * up[r], for r from `first` to `last`."""
    if kind == SWIGLU:
        for r in range(first, last):
            z = float_at(gate, r)
            put_float(up, r, float_at(up, r) * z / (_F(1) + exp(-z)))
    elif kind == RELU:
        for r in range(first, last):
            put_float(up, r, max(float_at(up, r), _F(0)))
    elif kind == GELU_TANH:
        for r in range(first, last):
            z = float_at(up, r)
            inner = _F(1.5957691216) * (z + _F(0.044715) * z * z * z)
            put_float(up, r, z / (_F(1) + exp(-inner)))
    else:
        for r in range(first, last):
            z = float_at(up, r)
            put_float(up, r, z * _F(0.5) * (_F(1) + _F(math.erf(z * _F(0.7071067812)))))


@njit
def rotate(vector, cos, sin, half):
    """Turns each pair (x_i, x_{i + half}) by the angle whose cosine and sine are given."""
    for d in range(half):
        x, y = float_at(vector, d), float_at(vector, d + half)
        c, s = float_at(cos, d), float_at(sin, d)
        put_float(vector, d, x * c - y * s)
        put_float(vector, d + half, y * c + x * s)


@njit(fastmath=True)
def _largest(x, n):
    largest = float_at(x, 0)
    for j in range(n):
        largest = max(largest, float_at(x, j))
    return largest


@njit(fastmath=True)
def _total(x, n):
    total = _F(0)
    for j in range(n):
        total += float_at(x, j)
    return total


@njit
def attend(query, keys, values, first, n, size, scale, scores, out):
    """out = softmax(scale * keys query) values, over the rows from `first`, less than LANES, to n;
    `size` is a multiple of GROUP.

    Keys lie as `make_scores` has them; what lies behind the last does not matter.
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
    highest = _largest(scores, n)
    for s in range(n):
        put_float(scores, s, exp((float_at(scores, s) - highest) * scale))
    total = _total(scores, n)
    d = 0
    while d < size:
        if size - d >= 64:
            _mix_64(scores, values + d * 4, step, n, out + d * 4)
            d += 64
        else:
            _mix_32(scores, values + d * 4, step, n, out + d * 4)
            d += 32
    for d in range(size):
        put_float(out, d, float_at(out, d) / total)
