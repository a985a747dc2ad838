"""The load that other processes put on this process's CPUs, from Linux's /proc/stat."""

import os
import time
from pathlib import Path

from tgen.errors import TgenError
from tgen.storage import files

_USED_COLUMNS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; not idle and iowait


class CpuLoad:
    """Use of the CPUs in the affinity of this process since the last call of `others`."""

    def __init__(self, *, root: Path = Path("/")) -> None:
        """Start to measure; `root` is where /proc is."""
        self._path = root / "proc/stat"
        self._last = self._read()

    def others(self) -> float | None:
        """Return the mean number of CPUs that other processes used, or None if unknown."""
        last, self._last = self._last, self._read()
        if last is None or self._last is None or self._last[0] <= last[0]:
            return None
        seconds, used, own = (now - before for now, before in zip(self._last, last, strict=True))
        return max(0.0, used - own) / seconds

    def _read(self) -> tuple[float, float, float] | None:
        """Return wall-clock seconds, CPU seconds of all processes and of this one, or None."""
        try:
            used = used_seconds(files.read(self._path), allowed_cpus())
        except (OSError, TgenError, ValueError, IndexError):
            return None
        return time.monotonic(), used, time.process_time()


def allowed_cpus() -> set[int]:
    """Return the CPUs in the affinity of this process."""
    affinity = getattr(os, "sched_getaffinity", None)
    return set(affinity(0)) if affinity else set(range(os.cpu_count() or 1))


def used_seconds(stat: bytes, cpus: set[int]) -> float:
    """Return the seconds that `cpus` have worked, from the content of /proc/stat.

    Raises ValueError or IndexError if the format is unknown.
    """
    ticks = {}
    for line in stat.splitlines():
        name, _, rest = line.partition(b" ")
        if name.startswith(b"cpu") and name != b"cpu":
            columns = rest.split()
            ticks[int(name[3:])] = sum(int(columns[i]) for i in _USED_COLUMNS)
    return sum(ticks[cpu] for cpu in cpus & ticks.keys()) / os.sysconf("SC_CLK_TCK")
