"""Conversion between tensors of a file and tgen's, both stacked along the first axis.

`hf.tensor_names` has the names and shapes of transformers, `gguf.tensor_names` those of llama.cpp.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.dtypes import Array, stack, to_float32

Shape = tuple[int, ...]


class TensorMapping(NamedTuple):
    """Some of tgen's tensors, and the tensors of a file that contain them."""

    ours: tuple[str, ...]
    rows: tuple[int, ...]  # of each of ours
    theirs: tuple[str, ...]
    shapes: tuple[Shape, ...]  # stored shape of each of theirs
    transposed: bool = False
    interleaved_heads: int = 0  # heads whose query, key and value follow each other in theirs
    interleaved_halves: tuple[int, ...] = ()  # of each of theirs, heads with interleaved halves
    n_rotated: int = 0  # rows of such a head whose halves are interleaved: its first
    adds_one: bool = False  # theirs are larger by 1
    unused_rows: int = 0  # theirs begin with so many rows that nothing reads

    def to_theirs(self, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Yield the tensors of the file, contiguous, from tgen's arrays by name."""
        stacked = stack([arrays[name] for name in self.ours])
        if self.adds_one:
            stacked = to_float32(stacked) + np.float32(1)
        stacked = interleave_qkv(stacked, self.interleaved_heads)
        rows = -1 if self.transposed else 0
        sizes = [shape[rows] - self.unused_rows for shape in self.shapes]
        parts = np.split(stacked, np.cumsum(sizes)[:-1])
        for name, part, heads in zip(self.theirs, parts, self._halves, strict=True):
            part = interleave_halves(part, heads, self.n_rotated)
            if self.unused_rows:
                part = np.pad(part, ((self.unused_rows, 0), (0, 0)))
            yield name, np.ascontiguousarray(part.T if self.transposed else part)

    def to_ours(self, parts: Sequence[Array]) -> Iterator[tuple[str, Array]]:
        """Yield tgen's tensors, contiguous, from those of the file: the inverse of `to_theirs`."""
        parts = [part.T for part in parts] if self.transposed else parts
        parts = [part[self.unused_rows :] for part in parts] if self.unused_rows else parts
        halves = zip(parts, self._halves, strict=True)
        stacked = stack([separate_halves(part, heads, self.n_rotated) for part, heads in halves])
        stacked = separate_qkv(stacked, self.interleaved_heads)
        if self.adds_one:
            stacked = to_float32(stacked) - np.float32(1)
        pieces = np.split(stacked, np.cumsum(self.rows)[:-1])
        yield from zip(self.ours, map(np.ascontiguousarray, pieces), strict=True)

    def rows_to_ours(self, i: int, rows: Array) -> Array:
        """Return rows of the i-th of theirs in our order."""
        rows = separate_halves(rows, self._halves[i], self.n_rotated)
        return separate_qkv(rows, self.interleaved_heads)

    def rows_to_theirs(self, i: int, rows: Array) -> Array:
        """Undo `rows_to_ours`."""
        rows = interleave_qkv(rows, self.interleaved_heads)
        return interleave_halves(rows, self._halves[i], self.n_rotated)

    @property
    def _halves(self) -> Sequence[int]:
        return self.interleaved_halves or (0,) * len(self.theirs)


def shapes_by_name(mappings: Iterable[TensorMapping]) -> dict[str, Shape]:
    """Return the stored shape of every tensor that a file must contain."""
    return {
        name: shape
        for mapping in mappings
        for name, shape in zip(mapping.theirs, mapping.shapes, strict=True)
    }


def interleave_qkv(rows: Array, heads: int) -> Array:
    """Reorder rows of (3, heads, ...) to (heads, 3, ...), which 0 heads leave as they are."""
    return _swap(rows, 3, heads) if heads else rows


def separate_qkv(rows: Array, heads: int) -> Array:
    """Undo `interleave_qkv`."""
    return _swap(rows, heads, 3) if heads else rows


def interleave_halves(rows: Array, heads: int, n_rotated: int) -> Array:
    """Interleave the halves of the first `n_rotated` rows of each head, if there are heads."""
    return _reorder(rows, heads, lambda n: np.arange(n).reshape(2, -1).T.ravel(), n_rotated)


def separate_halves(rows: Array, heads: int, n_rotated: int) -> Array:
    """Undo `interleave_halves`."""
    return _reorder(rows, heads, lambda n: np.arange(n).reshape(-1, 2).T.ravel(), n_rotated)


def _reorder(
    rows: Array, heads: int, order: Callable[[int], NDArray[np.int64]], n_rotated: int
) -> Array:
    if not heads:
        return rows
    by_head = rows.reshape(heads, -1, *rows.shape[1:])
    indices = np.arange(by_head.shape[1])
    indices[:n_rotated] = order(n_rotated)
    return by_head[:, indices].reshape(rows.shape)


def _swap(rows: Array, m: int, n: int) -> Array:
    """Reorder rows of (m, n, ...) to (n, m, ...)."""
    return rows.reshape(m, n, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)
