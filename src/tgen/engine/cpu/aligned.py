"""Arrays that begin at a cache line, so that vectors and rows of whole lines do too."""

import math

import numpy as np
from numpy.typing import DTypeLike

from tgen.checkpoint.dtypes import Array
from tgen.engine.cpu.job_layout import CACHE_LINE


def allocate_aligned(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """Zeros; their pages cost no RAM until they are written."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(n_bytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + n_bytes].view(dtype).reshape(shape)
