"""Arrays that stay on the disk: their slices are read by position, and nothing else is in memory.

They have a length, a dtype and slices, as NumPy's arrays have: who needs no more takes both.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tgen.errors import TgenError
from tgen.storage.files import ByPosition

IN_MEMORY = 1 << 25  # bytes up to which an array is better kept in memory
_BLOCK = 1 << 22  # bytes


class DiskArray:
    """`length` numbers of a file, from byte `start` on, (length,)."""

    def __init__(self, file: ByPosition, start: int, length: int, dtype: DTypeLike) -> None:
        self._file, self._start, self._length = file, start, length
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> NDArray[Any]:
        """A slice without a step, in memory; raises TgenError where the file has become shorter."""
        first, last, step = where.indices(self._length)
        assert step == 1
        n = max(0, last - first) * self.dtype.itemsize
        data = self._file.read(self._start + first * self.dtype.itemsize, n)
        if len(data) != n:
            raise TgenError(
                "the tokens have become fewer while they were read",
                "something else has written to the file that holds them",
            )
        return np.frombuffer(data, self.dtype)


Array = NDArray[Any] | DiskArray  # of one dimension


def blocks(array: Array) -> Iterator[NDArray[Any]]:
    """All of an array, a few megabytes at a time."""
    n = max(1, _BLOCK // array.dtype.itemsize)
    for start in range(0, len(array), n):
        yield array[start : start + n]
