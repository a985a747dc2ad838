"""Limits of the control groups of this process (containers, batch systems) to its RAM and CPU time.

Linux has two versions of control groups, and a limit may be set at any level of their hierarchy.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tgen.storage import files

_ROOT = Path("/")


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
    return files.read_if_possible(path).decode(errors="replace")
