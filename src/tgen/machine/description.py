"""The machine of a benchmark: CPU, load and versions."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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


def describe_cpu() -> dict[str, str]:
    """Return the name of the CPU and the flags that Linux lists, "" if unknown."""
    return {"cpu": _cpu_name(), "cpu_flags": _cpu_field("flags") or _cpu_field("Features")}


def _cpu_name() -> str:
    return _cpu_field("model name") or platform.processor() or platform.machine()


def _cpu_field(name: str) -> str:
    """Return a field of the first CPU in Linux's /proc/cpuinfo, or ""."""
    text = files.read_if_possible(Path("/proc/cpuinfo")).decode(errors="replace")
    lines = text.splitlines()
    values = [line.split(":", 1)[1].strip() for line in lines if line.startswith(name)]
    return values[0] if values else ""
