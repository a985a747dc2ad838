"""The values of quantized blocks, bit for bit as ggml-quants.c computes them.

Types that few files have (IQ1 to IQ3, TQ, MXFP4, NVFP4) are left to the package gguf, which takes
longer to import than a small model takes to load.
"""

from collections.abc import Callable

import numpy as np

from tgen.checkpoint.dtypes import Array, Floats

_BLOCKS_AT_ONCE = 4096  # the intermediate results stay in the CPU's cache
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(rows: Array, ggml_type: int) -> Floats:
    """Return the values (m, n) of rows of blocks (m, bytes per row); `ggml_type` is in `BLOCKS`."""
    _, n_values, n_bytes, convert = BLOCKS[ggml_type]
    blocks = rows.reshape(-1, n_bytes)
    out = np.empty((len(blocks), n_values), np.float32)
    for i in range(0, len(blocks), _BLOCKS_AT_ONCE):
        some = blocks[i : i + _BLOCKS_AT_ONCE]
        out[i : i + len(some)] = convert(some).reshape(len(some), n_values)
    return out.reshape(len(rows), rows.shape[1] // n_bytes * n_values)


def six_bit_factors(packed: Array) -> tuple[Array, Array]:
    """(m, 12) -> 8 factors of scales and 8 of minima; see ggml's `get_scale_min_k4`."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    factors = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=1)
    offsets = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=1)
    return factors, offsets


def _half(blocks: Array, start: int) -> Floats:
    """Return the float16 at a byte of each block as float32, (m, 1)."""
    values: Floats = np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")
    return values.astype(np.float32)


def _bits(packed: Array, width: int, group: int) -> Array:
    """Return unsigned numbers of `width` bits: of each `group` of bytes, first the lowest bits of
    all, then the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, group) >> shifts & np.uint8((1 << width) - 1)
    return parts.reshape(len(packed), -1)


def _signed(numbers: Array, offset: int) -> Floats:
    """Return numbers below 128 minus an offset."""
    return (numbers.astype(np.int8) - np.int8(offset)).astype(np.float32)


def _scaled(factors: Floats, numbers: Array) -> Floats:
    """Multiply groups of numbers by their factor each, (m, groups): (m, groups, size)."""
    groups = numbers.reshape(*factors.shape, -1)
    return factors[..., None] * groups.astype(np.float32, copy=False)


def _q4_0(b: Array) -> Floats:
    return _half(b, 0) * _signed(_bits(b[:, 2:], 4, 16), 8)


def _q4_1(b: Array) -> Floats:
    return _half(b, 0) * _bits(b[:, 4:], 4, 16).astype(np.float32) + _half(b, 2)


def _five_bits(low: Array, high: Array) -> Array:
    numbers: Array = np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    numbers |= _bits(low, 4, 16)
    return numbers


def _q5_0(b: Array) -> Floats:
    return _half(b, 0) * _signed(_five_bits(b[:, 6:], b[:, 2:6]), 16)


def _q5_1(b: Array) -> Floats:
    return _half(b, 0) * _five_bits(b[:, 8:], b[:, 4:8]).astype(np.float32) + _half(b, 2)


def _q8_0(b: Array) -> Floats:
    return b[:, 2:].view(np.int8).astype(np.float32) * _half(b, 0)


def _q2_k(b: Array) -> Floats:
    scales = _half(b, 80) * (b[:, :16] & 15).astype(np.float32)
    minima = _half(b, 82) * (b[:, :16] >> 4).astype(np.float32)
    return _scaled(scales, _bits(b[:, 16:80], 2, 32)) - minima[..., None]


def _q3_k(b: Array) -> Floats:
    factors = _bits(b[:, 96:104], 4, 8) | _bits(b[:, 104:108], 2, 4) << np.uint8(4)
    numbers = _bits(b[:, 32:96], 2, 32) | _bits(b[:, :32], 1, 32) << np.uint8(2)
    return _scaled(_half(b, 108) * _signed(factors, 32), _signed(numbers, 4))


def _q4_k(b: Array) -> Floats:
    return _with_minima(b, _bits(b[:, 16:], 4, 32))


def _q5_k(b: Array) -> Floats:
    return _with_minima(b, _bits(b[:, 48:], 4, 32) | _bits(b[:, 16:48], 1, 32) << np.uint8(4))


def _with_minima(b: Array, numbers: Array) -> Floats:
    factors, offsets = six_bit_factors(b[:, 4:16])
    minima = _half(b, 2) * offsets.astype(np.float32)
    return _scaled(_half(b, 0) * factors.astype(np.float32), numbers) - minima[..., None]


def _q6_k(b: Array) -> Floats:
    numbers = _bits(b[:, :128], 4, 64) | _bits(b[:, 128:192], 2, 32) << np.uint8(4)
    factors = b[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(_half(b, 208) * factors, _signed(numbers, 32))


def _iq4_nl(b: Array) -> Floats:
    return _half(b, 0) * np.array(_IQ4, np.float32)[_bits(b[:, 2:], 4, 16)]


def _iq4_xs(b: Array) -> Floats:
    factors = _bits(b[:, 4:8], 4, 1) | _bits(b[:, 2:4], 2, 1) << np.uint8(4)
    numbers = np.array(_IQ4, np.float32)[_bits(b[:, 8:], 4, 16)]
    return _scaled(_half(b, 0) * _signed(factors, 32), numbers)


# By type: name, values and bytes of a block, values of blocks (m, bytes).
BLOCKS: dict[int, tuple[str, int, int, Callable[[Array], Floats]]] = {
    2: ("q4_0", 32, 18, _q4_0),
    3: ("q4_1", 32, 20, _q4_1),
    6: ("q5_0", 32, 22, _q5_0),
    7: ("q5_1", 32, 24, _q5_1),
    8: ("q8_0", 32, 34, _q8_0),
    10: ("q2_k", 256, 84, _q2_k),
    11: ("q3_k", 256, 110, _q3_k),
    12: ("q4_k", 256, 144, _q4_k),
    13: ("q5_k", 256, 176, _q5_k),
    14: ("q6_k", 256, 210, _q6_k),
    20: ("iq4_nl", 32, 18, _iq4_nl),
    23: ("iq4_xs", 256, 136, _iq4_xs),
}
