"""The machine of a benchmark: CPU, load, versions, and a probe of its current speed."""

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from tgen.errors import TgenError
from tgen.machine.cpus import cpu_count
from tgen.reports.benchmark import Machine
from tgen.storage import files

_PACKAGES = ("tgen-lm", "torch", "numpy", "llvmlite", "transformers", "llama-cpp-python")
_PROBE_BYTES = 4 << 20  # per thread
_PROBE_REPEATS = 3


def describe_machine() -> Machine:
    """Return everything that a timing depends on, except the model."""
    return Machine(
        cpu=_cpu_name(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        n_cpus=cpu_count(),
        versions={"python": platform.python_version()}
        | {name: found for name in _PACKAGES if (found := _version(name))},
    )


class MachineProbe:
    """A constant NumPy workload, interleaved with the trials to measure the machine's speed.

    Each thread sums its own array, and the slowest thread counts: like an engine's forward
    pass, the probe waits for all threads, so it notices when another process occupies a CPU.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._arrays = [np.ones(_PROBE_BYTES // 4, np.float32) for _ in range(threads)]

    def measure_seconds(self) -> float:
        """Return the best of three: the engine's threads may still be spinning after a trial."""
        with ThreadPoolExecutor(self._threads) as pool:
            seconds = []
            for _ in range(_PROBE_REPEATS):
                begin = time.perf_counter()
                list(pool.map(np.add.reduce, self._arrays))
                seconds.append(time.perf_counter() - begin)
        return min(seconds)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        lines = files.read(Path("/proc/cpuinfo")).decode(errors="replace").splitlines()
    except TgenError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
