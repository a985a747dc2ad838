"""The CPUs: their number, the number of threads, and the load of other processes, from Linux's
/proc/stat. Does not import torch."""

import os
import time
from pathlib import Path

from tgen import distributed
from tgen.errors import TgenError
from tgen.machine.control_groups import cpu_quota
from tgen.storage import files

_ROOT = Path("/")
_USED_COLUMNS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; not idle and iowait


class CpuLoad:
    """Use of the CPUs in the affinity of this process since the last call of `others`."""

    def __init__(self, *, root: Path = _ROOT) -> None:
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


def cpu_count(*, root: Path = _ROOT) -> int:
    """Return the CPUs that this process may use, at least 1.

    The CPU affinity and a container's CPU quota limit the number. The quota is rounded down: with
    one thread more, the system would stop all threads for a part of every 100 ms. `root` is where
    /proc and /sys are.
    """
    return min(len(allowed_cpus()), _whole_quota(root))


def default_threads(*, shared_by: int = 1, root: Path = _ROOT) -> int:
    """Return the default number of threads to compute with, at least 1.

    One per physical core, since two threads of a core share its arithmetic units, divided by
    `shared_by`. Batch systems set fewer in OMP_NUM_THREADS or SLURM_CPUS_PER_TASK.
    """
    threads = _environment_number("OMP_NUM_THREADS")
    # torchrun sets 1 if the user sets nothing.
    if threads and not (threads == 1 and distributed.launched()):
        return min(threads, cpu_count(root=root))
    n_cores = len({_core(cpu, root) for cpu in allowed_cpus()})
    n = min(n_cores, _whole_quota(root), _environment_number("SLURM_CPUS_PER_TASK") or n_cores)
    return max(1, n // shared_by)


def _whole_quota(root: Path) -> int:
    quota = cpu_quota(root)
    return max(1, int(quota)) if quota is not None else 1 << 30


def _core(cpu: int, root: Path) -> bytes:
    """The CPUs that share a core with `cpu`, as Linux writes them; only `cpu` if unknown."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second in old kernels
        if shared := files.read_if_possible(topology / name).strip():
            return shared
    return str(cpu).encode()


def _environment_number(name: str) -> int | None:
    """The first positive number of an environment variable like "4" or "4,2", or None."""
    first = os.environ.get(name, "").split(",")[0].strip()
    return int(first[:9]) or None if first.isdecimal() else None
