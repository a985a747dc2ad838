"""The machine of a benchmark: CPU, load and versions."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tgen.errors import TgenError
from tgen.machine.cpus import cpu_count
from tgen.reports.benchmark import Machine
from tgen.storage import files

_PACKAGES = ("tgen-lm", "torch", "numpy", "llvmlite", "transformers", "llama-cpp-python")


def describe_machine() -> Machine:
    """Return everything that a timing depends on, except the model."""
    return Machine(
        cpu=_cpu_name(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        n_cpus=cpu_count(),
        versions={"python": platform.python_version()}
        | {name: found for name in _PACKAGES if (found := _version(name))},
    )


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
