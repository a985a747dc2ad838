"""The number of CPUs and of threads, without torch.

The load that other processes put on this process's CPUs, from Linux's /proc/stat.

PyTorch's CPU threads wait without spinning while other processes need the CPUs.

After each operation OpenMP's threads wait for each other, and spin for milliseconds before they
sleep. On an idle machine this is fastest. If another process uses a CPU, a spinning thread occupies
the CPU that the thread it waits for needs, and training can be 60 times slower. GNU's libgomp,
which PyTorch's wheels for Linux contain, spins a thousandth as long while the process has more
OpenMP threads than CPUs (see GOMP_SPINCOUNT in its manual). So on a busy machine, tgen starts extra
OpenMP threads that only sleep. The number of threads that compute stays the same, and so do the
results.
"""

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from tgen import distributed
from tgen.errors import TgenError
from tgen.machine.container_limits import cpu_quota
from tgen.storage import files

_ROOT = Path("/")


def cpu_count(*, shared_by: int = 1, root: Path = _ROOT) -> int:
    """Return the CPUs that this process may use, divided by `shared_by`, at least 1.

    The CPU affinity and a container's CPU quota limit the number. The quota is rounded down: with
    one thread more, the system would stop all threads for a part of every 100 ms. `root` is where
    /proc and /sys are.
    """
    return max(1, min(len(allowed_cpus()), _whole_quota(root)) // shared_by)


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
        try:
            return files.read(topology / name).strip()
        except (TgenError, OSError):
            pass
    return str(cpu).encode()


def _environment_number(name: str) -> int | None:
    """The first positive number of an environment variable like "4" or "4,2", or None."""
    first = os.environ.get(name, "").split(",")[0].strip()
    return int(first[:9]) or None if first.isdecimal() else None


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


_SECONDS = 0.5  # between two measurements of the load
_TOLERANCE = 0.3  # CPUs: short spinning costs more than a smaller load
_ELEMENTS = 1 << 20  # enough for torch to divide the work between its threads


class BusyMachine:
    """Whether other processes need the CPUs that `threads` threads of this one compute on."""

    def __init__(self, threads: int, n_cpus: int) -> None:
        self.threads, self._n_cpus = threads, n_cpus
        self.other_cpus: float | None = None  # used by other processes; None: machine not busy
        self._pools: list[_SleepingPool] = []

    def update(self, other_cpus: float | None) -> None:
        """Store the number of CPUs that other processes use, and choose how threads wait."""
        if other_cpus is None or self.threads + other_cpus <= self._n_cpus + _TOLERANCE:
            self.other_cpus = None
            self.release()
            return
        self.other_cpus = other_cpus
        with suppress(RuntimeError):  # the system's limit of threads: try again later
            while len(self._pools) < self.n_pools:
                self._pools.append(_SleepingPool())

    @property
    def n_pools(self) -> int:
        """Number of sleeping pools that gives this process more OpenMP threads than CPUs."""
        if self.threads < 2:
            return 0  # a single thread waits for no other
        return -(-(self._n_cpus - self.threads + 1) // (self.threads - 1))

    def release(self) -> None:
        """End the sleeping threads."""
        for pool in self._pools:
            pool.end()
        self._pools = []


class _SleepingPool:
    """As many OpenMP threads as torch uses, started by the first of them; all sleep until `end`."""

    def __init__(self) -> None:
        self._started, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tgen-openmp", daemon=True)
        self._thread.start()
        self._started.wait()

    def end(self) -> None:
        """End the threads."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            torch.zeros(_ELEMENTS).add_(1)
        finally:
            self._started.set()
        self._ended.wait()


_machine: BusyMachine | None = None


def watch_load(threads: int) -> None:
    """Start to adapt how torch's `threads` threads wait to the load of the machine."""
    global _machine
    if not sys.platform.startswith("linux"):
        return
    if _machine is None:
        _machine, ended = BusyMachine(threads, len(allowed_cpus())), threading.Event()
        watcher = threading.Thread(
            target=_watch, args=(_machine, ended), name="tgen-load", daemon=True
        )
        watcher.start()
        atexit.register(_end, watcher, ended)
    elif threads != _machine.threads:
        _machine.threads = threads


def other_cpus() -> float | None:
    """Return the CPUs that other processes used in the last half second if that slows this one,
    None otherwise or if unknown."""
    return None if _machine is None else _machine.other_cpus


def _watch(machine: BusyMachine, ended: threading.Event) -> None:
    load = CpuLoad()
    while not ended.wait(_SECONDS):
        machine.update(load.others())
    machine.release()


def _end(watcher: threading.Thread, ended: threading.Event) -> None:
    """End all threads: Python aborts if it ends while one of them is in torch."""
    ended.set()
    watcher.join()
