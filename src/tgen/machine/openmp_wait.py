"""PyTorch's CPU threads wait without spinning while other processes need the CPUs.

After each operation OpenMP's threads wait for each other, and spin for milliseconds before they
sleep. On an idle machine this is fastest. If another process uses a CPU, a spinning thread occupies
the CPU that the thread it waits for needs, and training can be 60 times slower. GNU's libgomp,
which PyTorch's wheels for Linux contain, spins a thousandth as long while the process has more
OpenMP threads than CPUs (see GOMP_SPINCOUNT in its manual). So on a busy machine, tgen starts extra
OpenMP threads that only sleep. The number of threads that compute stays the same, and so do the
results.
"""

import atexit
import sys
import threading
from contextlib import suppress

import torch

from tgen.machine.cpus import CpuLoad, allowed_cpus

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
