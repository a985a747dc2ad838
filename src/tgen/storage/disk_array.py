"""Arrays that stay on disk; slices are read into memory on demand.

Like NumPy arrays they have a length, a dtype and slices; code that needs no more accepts both.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tgen.errors import TgenError
from tgen.storage.files import RandomAccessFile

IN_MEMORY = 1 << 25  # bytes; smaller arrays are loaded into memory
_BLOCK = 1 << 22  # bytes


class DiskArray:
    """One-dimensional array of `length` numbers in a file, from byte `start` on."""

    def __init__(self, file: RandomAccessFile, start: int, length: int, dtype: DTypeLike) -> None:
        self._file, self._start, self._length = file, start, length
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, selection: slice) -> NDArray[Any]:
        """Read a slice with step 1; raise TgenError if the file is now too short."""
        first, last, step = selection.indices(self._length)
        assert step == 1
        n_bytes = max(0, last - first) * self.dtype.itemsize
        data = self._file.read(self._start + first * self.dtype.itemsize, n_bytes)
        if len(data) != n_bytes:
            raise TgenError(
                "the token file became shorter while it was read",
                "make sure that no other program writes to it",
            )
        return np.frombuffer(data, self.dtype)


Array = NDArray[Any] | DiskArray  # one-dimensional


def blocks(array: Array) -> Iterator[NDArray[Any]]:
    """Yield an array's content in blocks of 4 MiB."""
    n = max(1, _BLOCK // array.dtype.itemsize)
    for start in range(0, len(array), n):
        yield array[start : start + n]
