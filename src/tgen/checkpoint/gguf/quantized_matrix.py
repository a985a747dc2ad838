"""Matrices of quantized GGUF files, kept in the bytes of the file until their values are needed.

The values are those that ggml-quants.c computes, bit for bit. Types that few files have (IQ1 to
IQ3, TQ, MXFP4, NVFP4) are left to the package gguf, which takes longer to import than a small model
takes to load.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tgen.checkpoint.dtypes import Array, Floats, to_float32

_ROWS_AT_ONCE = 1024
_BLOCKS_AT_ONCE = 4096  # the intermediate results stay in the CPU's cache
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_Q4_0, _Q4_1, _Q8_0, _Q4_K = 2, 3, 8, 12


class Rows(NamedTuple):
    """Rows of a matrix: bytes (m, bytes per row) in blocks of a GGUF type, or floats (m, n)."""

    data: Array
    ggml_type: int | None  # None: float32, float16 or bfloat16 bits


class QuantizedMatrix:
    """A float32 matrix (m, n) that takes as much memory as in its file.

    Used in place of an array: its shape, and slices of its rows, which are dequantized. Only
    conversions to an array (`np.asarray`, `astype`, `to_float32`) dequantize all of it at once.
    """

    dtype = np.dtype(np.float32)
    ndim = 2

    def __init__(self, parts: Sequence[Rows], n_columns: int) -> None:
        """Stack `parts`, which may have different types."""
        self._parts = list(parts)
        self.shape = (sum(len(part.data) for part in parts), n_columns)

    @classmethod
    def stack(cls, matrices: Sequence["Array | QuantizedMatrix"]) -> "QuantizedMatrix":
        """Stack matrices with the same number of columns, without copying them."""
        parts: list[Rows] = []
        for matrix in matrices:
            parts += matrix._parts if isinstance(matrix, cls) else [Rows(np.asarray(matrix), None)]
        return cls(parts, matrices[0].shape[1])

    def map_rows(self, change: Callable[[Array], Array]) -> "QuantizedMatrix":
        """Reorder or repeat the rows of each part, or add rows of zero bytes, which are zeros, by a
        function of an array (m, ...)."""
        parts = [Rows(change(data), ggml_type) for data, ggml_type in self._parts]
        return QuantizedMatrix(parts, self.shape[1])

    def split(self, sizes: Sequence[int]) -> list["QuantizedMatrix"]:
        """Split a matrix of one part into matrices with these numbers of rows."""
        ((data, ggml_type),) = self._parts
        pieces = np.split(data, np.cumsum(sizes)[:-1])
        return [QuantizedMatrix([Rows(piece, ggml_type)], self.shape[1]) for piece in pieces]

    @property
    def size(self) -> int:
        """Number of values."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored blocks."""
        return sum(part.data.nbytes for part in self._parts)

    @property
    def has_four_bits(self) -> bool:
        """Whether all weights are a scale times an integer from 0 to 15, plus a minimum."""
        return all(ggml_type in (_Q4_0, _Q4_1, _Q4_K) for _, ggml_type in self._parts)

    def four_bit_groups(self, start: int, end: int) -> tuple[Array, Array, Array]:
        """Return integers (m, n), scales and minima (m, n / 32) of rows of a 4-bit matrix.

        Scales and minima are float16: those of the file, or of Q4_K the nearest.
        """
        results = [_four_bit_rows(*rows) for rows in self._choose(start, end)]
        numbers, scales, minima = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
        return numbers, scales, minima

    @property
    def has_eight_bits(self) -> bool:
        """Whether all weights are a scale times an integer from -128 to 127."""
        return all(ggml_type == _Q8_0 for _, ggml_type in self._parts)

    def eight_bit_groups(self, start: int, end: int) -> tuple[Array, Array]:
        """Return the integers (m, n) and float16 scales (m, n / 32) of rows of an 8-bit matrix."""
        rows = np.concatenate([data for data, _ in self._choose(start, end)])
        blocks = rows.reshape(len(rows), -1, 34)
        numbers = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
        return numbers.reshape(len(rows), -1), scales

    def _choose(self, start: int, end: int) -> Iterator[Rows]:
        """Yield the parts of consecutive rows."""
        first = 0  # the part's first row in the matrix
        for data, ggml_type in self._parts:
            chosen = data[max(0, start - first) : max(0, end - first)]
            first += len(data)
            if len(chosen):
                yield Rows(chosen, ggml_type)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Floats:
        """Return consecutive rows, dequantized: (rows, n)."""
        start, stop, _ = rows.indices(len(self))
        out = np.empty((max(0, stop - start), self.shape[1]), np.float32)
        end = 0
        for data, ggml_type in self._choose(start, stop):
            first, end = end, end + len(data)
            out[first:end] = self._dequantize(data, ggml_type)
        return out

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Dequantize the whole matrix."""
        return self[:].astype(dtype or np.float32, copy=False)

    def astype(self, dtype: DTypeLike, *, copy: bool = True) -> NDArray[Any]:  # noqa: ARG002
        """Dequantize the whole matrix, always to a new array."""
        return self.__array__(dtype)

    def is_finite(self) -> bool:
        """Whether no value is infinite or NaN."""
        for data, ggml_type in self._parts:
            if ggml_type not in BLOCKS:
                starts = range(0, len(self), _ROWS_AT_ONCE)
                if not all(np.isfinite(self[i : i + _ROWS_AT_ONCE]).all() for i in starts):
                    return False
                continue
            block = BLOCKS[ggml_type]
            blocks = data.reshape(-1, block.n_bytes)
            scales = (np.ascontiguousarray(blocks[:, i : i + 2]).view("<u2") for i in block.scales)
            if not all(((bits & 0x7C00) != 0x7C00).all() for bits in scales):
                return False
        return True

    def _dequantize(self, data: Array, ggml_type: int | None) -> Floats:
        if ggml_type is None:
            return to_float32(data)
        with np.errstate(all="ignore"):  # `is_finite` reports values that are not finite
            if ggml_type in BLOCKS:
                return dequantize(data, ggml_type)
            import gguf

            wide = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(ggml_type))
        return np.asarray(wide.reshape(len(data), -1), np.float32)


def _four_bit_rows(data: Array, ggml_type: int | None) -> tuple[Array, Array, Array]:
    """Read blocks as in ggml-common.h: see `QuantizedMatrix.four_bit_groups`."""
    m = len(data)
    if ggml_type == _Q4_K:
        blocks = data.reshape(-1, 144)
        scale, minimum = blocks[:, :4].copy().view("<f2").astype(np.float32).T[..., None]
        factors, offsets = _six_bit_factors(blocks[:, 4:16])
        scales, minima = scale * factors, -minimum * offsets
        halves = blocks[:, 16:].reshape(-1, 4, 1, 32)
    else:
        blocks = data.reshape(-1, 18 if ggml_type == _Q4_0 else 20)
        scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
        minima = -8 * scales if ggml_type == _Q4_0 else blocks[:, 2:4].copy().view("<f2")
        halves = blocks[:, -16:].reshape(-1, 1, 1, 16)
    numbers = np.concatenate([halves & 15, halves >> 4], axis=2)
    largest = np.finfo(np.float16).max
    rounded = (np.clip(a, -largest, largest).astype(np.float16) for a in (scales, minima))
    return numbers.reshape(m, -1), *(a.reshape(m, -1) for a in rounded)


def dequantize(rows: Array, ggml_type: int) -> Floats:
    """Return the values (m, n) of rows of blocks (m, bytes per row); `ggml_type` is in `BLOCKS`."""
    _, n_values, n_bytes, _, convert = BLOCKS[ggml_type]
    blocks = rows.reshape(-1, n_bytes)
    out = np.empty((len(blocks), n_values), np.float32)
    for i in range(0, len(blocks), _BLOCKS_AT_ONCE):
        some = blocks[i : i + _BLOCKS_AT_ONCE]
        out[i : i + len(some)] = convert(some).reshape(len(some), n_values)
    return out.reshape(len(rows), rows.shape[1] // n_bytes * n_values)


def _six_bit_factors(packed: Array) -> tuple[Array, Array]:
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
    factors, offsets = _six_bit_factors(b[:, 4:16])
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


class BlockType(NamedTuple):
    """One of ggml's types of quantized blocks."""

    name: str
    n_values: int
    n_bytes: int
    scales: tuple[int, ...]  # where a block has float16 scales: its values are finite if they are
    convert: Callable[[Array], Floats]  # blocks (m, n_bytes) to their values


BLOCKS = {
    2: BlockType("q4_0", 32, 18, (0,), _q4_0),
    3: BlockType("q4_1", 32, 20, (0, 2), _q4_1),
    6: BlockType("q5_0", 32, 22, (0,), _q5_0),
    7: BlockType("q5_1", 32, 24, (0, 2), _q5_1),
    8: BlockType("q8_0", 32, 34, (0,), _q8_0),
    10: BlockType("q2_k", 256, 84, (80, 82), _q2_k),
    11: BlockType("q3_k", 256, 110, (108,), _q3_k),
    12: BlockType("q4_k", 256, 144, (0, 2), _q4_k),
    13: BlockType("q5_k", 256, 176, (0, 2), _q5_k),
    14: BlockType("q6_k", 256, 210, (208,), _q6_k),
    20: BlockType("iq4_nl", 32, 18, (0,), _iq4_nl),
    23: BlockType("iq4_xs", 256, 136, (0,), _iq4_xs),
}
