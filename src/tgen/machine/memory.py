"""The RAM that this process has used and can still allocate, and the C library's allocator. Works
without torch.

By default, glibc returns large blocks to the system as soon as they are freed, and the system
clears their pages at the next use. A training step frees and allocates the same blocks again:
`retain_freed_memory` makes the allocator keep them.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tgen.errors import ModelError
from tgen.machine.control_groups import free_memory
from tgen.reports.number_format import format_bytes
from tgen.storage import files

_ROOT = Path("/")
_HINT = "use a smaller model, or raise the memory limit of the container or job"
_SMALL_CACHE = 1 << 26  # bytes; a smaller KV cache is not checked, so that short texts stay fast
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST = 32 << 20  # bytes; larger blocks are returned, so that free space is not fragmented
_RETAINED = 1 << 30  # bytes at the end of the heap
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def peak_memory_bytes() -> int | None:
    """Return the peak RSS of this process in bytes; None if the system does not report it.

    On Linux this is not getrusage's ru_maxrss, which starts at the peak of the parent process: a
    small child of a large parent would seem as large.
    """
    if peak := _own_bytes(b"VmHWM:"):
        return peak
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def free_ram(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process can still allocate at most; None if unknown.

    The machine's RAM minus the memory of this process, or what a container leaves if that is less.
    Other processes do not count: the system may swap them out. `root` is where /proc and /sys are.
    """
    sizes = [free_memory(root)]
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        sizes.append(max(0, total - _own_bytes(b"RssAnon:", root)))  # what cannot be dropped
    return min((size for size in sizes if size is not None), default=None)


def check_ram(n_bytes: int, purpose: str, hint: str = _HINT) -> None:
    """Raise ModelError if `n_bytes` more cannot fit: the system would kill the process.

    The message is "<purpose> needs ...".
    """
    free = free_ram()
    if free is not None and n_bytes > free:
        raise ModelError(
            f"{purpose} needs {format_bytes(n_bytes)} of memory, "
            f"but only {format_bytes(free)} is available",
            hint,
        )


def check_kv_cache_ram(
    lengths: Sequence[int], bytes_per_token: int, n_more: int | None = None
) -> None:
    """Raise ModelError if storage for sequences of these numbers of tokens cannot fit, of which
    `n_more` tokens need new memory; by default all."""
    n_bytes = (sum(lengths) if n_more is None else n_more) * bytes_per_token
    if n_bytes >= _SMALL_CACHE:
        texts = f"{len(lengths)} texts of up to " if len(lengths) > 1 else ""
        check_ram(
            n_bytes,
            f"the KV cache of {texts}{max(lengths):,} tokens",
            "generate fewer tokens or fewer texts at once, or use a smaller model",
        )


def _own_bytes(field: bytes, root: Path = _ROOT) -> int:
    """Return a size of this process from /proc; 0 if unknown."""
    lines = files.read_if_possible(root / "proc" / "self" / "status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def retain_freed_memory() -> None:
    """Make this process, until its end, reuse freed memory instead of returning it to the system.

    Only glibc has these settings; other C libraries stay as they are.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _RETAINED)
