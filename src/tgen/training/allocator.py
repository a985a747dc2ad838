"""Settings of the C library's allocator for training on a CPU.

By default, glibc returns large blocks to the system as soon as they are freed, and the system
clears their pages at the next use. A training step frees and allocates the same blocks again.
"""

import ctypes
import sys
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST = 32 << 20  # bytes; larger blocks are returned, so that free space is not fragmented
_RETAINED = 1 << 30  # bytes at the end of the heap
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def retain_freed_memory() -> None:
    """Make this process, until its end, reuse freed memory instead of returning it to the system.

    Only glibc has these settings; other C libraries stay as they are.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _RETAINED)
