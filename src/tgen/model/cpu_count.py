"""The number of CPUs and of threads, without torch."""

import os
from pathlib import Path

from tgen import distributed
from tgen.errors import TgenError
from tgen.model.cpu_load import allowed_cpus
from tgen.storage import files
from tgen.storage.container_limits import cpu_quota

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
