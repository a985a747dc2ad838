"""The RAM that this process has used and can still allocate, limits of its control groups
(containers, batch systems) to it and to the CPUs, and the C library's allocator. Works without
torch.

Linux has two versions of control groups, and a limit may be set at any level of their hierarchy.

By default, glibc returns large blocks to the system as soon as they are freed, and the system
clears their pages at the next use. A training step frees and allocates the same blocks again:
`retain_freed_memory` makes the allocator keep them.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tgen.errors import ModelError, TgenError
from tgen.reports.number_format import format_bytes
from tgen.storage import files

_ROOT = Path("/")
_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int | None:
    """Return the peak RSS of this process in bytes; None if the system does not report it.

    On Linux this is not getrusage's ru_maxrss, which starts at the peak of the parent process: a
    small child of a large parent would seem as large.
    """
    if _STATUS.exists():
        for line in files.read(_STATUS).splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPU time per second that the process may use, in CPUs; None without a quota.

    `root` is where /proc and /sys are.
    """
    quotas = []
    for folder in _folders("cpu", root):
        numbers = _numbers(folder / "cpu.max")
        numbers = numbers or [
            *_numbers(folder / "cpu.cfs_quota_us"),
            *_numbers(folder / "cpu.cfs_period_us"),
        ]
        if len(numbers) == 2 and min(numbers) > 0:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def free_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes until the tightest memory limit; None without a limit.

    Cached files count as free: the system drops them before it ends a process.
    """
    free = []
    for folder in _folders("memory", root):
        limit = _numbers(folder / "memory.max") or _numbers(folder / "memory.limit_in_bytes")
        used = _numbers(folder / "memory.current") or _numbers(folder / "memory.usage_in_bytes")
        if limit and used:
            free.append(max(0, limit[0] - used[0] + _cached_bytes(folder)))
    return min(free, default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """The directories of this process's groups, from the top down.

    In a container, the top may be the container's own group although the path is the host's.
    """
    mount = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if line.startswith("0::"):  # version 2; "unified" beside version 1
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / controllers, mount / controller]
        else:
            continue
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for top in tops:
            for n in range(len(parts) + 1):
                yield top.joinpath(*parts[:n])


def _cached_bytes(folder: Path) -> int:
    lines = _read(folder / "memory.stat").splitlines()
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    prefix = "total_" if "total_active_file" in stat else ""  # version 1: includes child groups
    values = [stat.get(f"{prefix}{kind}_file", "0") for kind in ("active", "inactive")]
    return sum(int(value) for value in values if value.isdecimal())


def _numbers(path: Path) -> list[int]:
    """The numbers in a file; empty if it is missing or unlimited ("max", -1)."""
    words = _read(path).split()
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else []


def _read(path: Path) -> str:
    try:
        return files.read(path).decode(errors="replace")
    except (TgenError, OSError):  # not Linux, or not permitted
        return ""


_HINT = "use a smaller model, or raise the memory limit of the container or job"
_SMALL_CACHE = 1 << 26  # bytes; a smaller KV cache is not checked, so that short texts stay fast
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST = 32 << 20  # bytes; larger blocks are returned, so that free space is not fragmented
_RETAINED = 1 << 30  # bytes at the end of the heap
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def free_ram(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process can still allocate at most; None if unknown.

    The machine's RAM minus the memory of this process, or what a container leaves if that is less.
    Other processes do not count: the system may swap them out. `root` is where /proc and /sys are.
    """
    sizes = [free_memory(root)]
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        sizes.append(max(0, total - _own_bytes(root)))
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


def _own_bytes(root: Path) -> int:
    """Bytes of this process that the system cannot drop; 0 if unknown."""
    try:
        lines = files.read(root / "proc" / "self" / "status").splitlines()
    except (TgenError, OSError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(b"RssAnon:")), 0)


def retain_freed_memory() -> None:
    """Make this process, until its end, reuse freed memory instead of returning it to the system.

    Only glibc has these settings; other C libraries stay as they are.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _RETAINED)
