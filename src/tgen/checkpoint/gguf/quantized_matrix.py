"""Matrices of quantized GGUF files, kept in the bytes of the file until their values are needed."""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tgen.checkpoint.dtypes import Array, Floats, to_float32
from tgen.checkpoint.gguf.dequantize import BLOCKS, dequantize, six_bit_factors
from tgen.errors import UsageError

_ROWS_AT_ONCE = 1024
# Where a block of each GGUF type has its float16 scales: all its values are finite if they are.
_SCALES = {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 10: (80, 82), 11: (108,)}
_SCALES |= {12: (0, 2), 13: (0, 2), 14: (208,), 20: (0,), 23: (0,)}
_Q4_0, _Q4_1, _Q8_0, _Q4_K = 2, 3, 8, 12


def require_package(purpose: str) -> Any:
    """Return the package gguf; raises UsageError if it is not installed."""
    if find_spec("gguf") is None:
        raise UsageError(f"{purpose} needs the gguf package", "pip install gguf")
    import gguf

    return gguf


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
        first = 0  # of the part, in the matrix
        for data, ggml_type in self._parts:
            chosen = data[max(0, start - first) : max(0, stop - first)]
            at = max(0, first - start)
            out[at : at + len(chosen)] = self._dequantize(chosen, ggml_type)
            first += len(data)
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
            offsets = _SCALES.get(-1 if ggml_type is None else ggml_type)
            if ggml_type is None or offsets is None:
                if not all(np.isfinite(part).all() for part in self._blocks_of_rows()):
                    return False
                continue
            blocks = data.reshape(-1, BLOCKS[ggml_type][2])
            scales = (np.ascontiguousarray(blocks[:, i : i + 2]).view("<u2") for i in offsets)
            if not all(((bits & 0x7C00) != 0x7C00).all() for bits in scales):
                return False
        return True

    def _blocks_of_rows(self) -> Iterator[Floats]:
        return (self[i : i + _ROWS_AT_ONCE] for i in range(0, len(self), _ROWS_AT_ONCE))

    def _dequantize(self, data: Array, ggml_type: int | None) -> Floats:
        if ggml_type is None or not len(data):
            return to_float32(data) if ggml_type is None else np.empty((0, self.shape[1]), "<f4")
        with np.errstate(all="ignore"):  # `is_finite` reports values that are not finite
            if ggml_type in BLOCKS:
                return dequantize(data, ggml_type)
            gguf = require_package("reading these weights")
            wide = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(ggml_type))
        return np.asarray(wide.reshape(len(data), -1), np.float32)


def _four_bit_rows(data: Array, ggml_type: int | None) -> tuple[Array, Array, Array]:
    """Read blocks as in ggml-common.h: see `QuantizedMatrix.four_bit_groups`."""
    m = len(data)
    if ggml_type == _Q4_K:
        blocks = data.reshape(-1, 144)
        scale, minimum = blocks[:, :4].copy().view("<f2").astype(np.float32).T[..., None]
        factors, offsets = six_bit_factors(blocks[:, 4:16])
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
