"""Arrays that begin at a cache line, so that vectors and rows of whole lines do too."""

import math

import numpy as np
from numpy.typing import DTypeLike

from tgen.checkpoint.dtypes import Array

_LINE = 64  # bytes of a cache line


def aligned(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Zeros; their pages cost no RAM until they are written."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(n_bytes + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + n_bytes].view(dtype).reshape(shape)
