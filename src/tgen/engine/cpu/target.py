"""The CPU that the kernels are compiled for: its vector registers and its integer instructions."""

import os
import platform
import sys
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from tgen.errors import TgenError
from tgen.storage import files

X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
ARM = platform.machine().lower() in ("aarch64", "arm64")


# Fields of Linux's /proc/cpuinfo that say what a CPU can do; the first are of x86, the last of ARM.
_CPU_FIELDS = (b"vendor_id", b"cpu family", b"model", b"stepping", b"flags", b"CPU ", b"Features")


def description() -> str:
    """Return what determines the machine code: the system, the CPU and the version of llvmlite."""
    chosen = [os.environ.get(name, "") for name in ("TGEN_CPU_NAME", "TGEN_CPU_FEATURES")]
    return "\n".join([sys.platform, platform.machine(), *chosen, _cpu(), *_llvmlite_version()])


def _cpu() -> str:
    """Return what Linux says about the first CPU, which takes less time than importing LLVM."""
    try:
        with files.open_regular(Path("/proc/cpuinfo")) as file:
            lines = takewhile(bytes.strip, file)  # an empty one follows each CPU
            known = b"".join(line for line in lines if line.startswith(_CPU_FIELDS))
    except TgenError:
        known = b""
    return known.decode(errors="replace") or f"{cpu_name()} {cpu_features()}"


def _llvmlite_version() -> list[str]:
    """Return the name of the package's metadata, which contains its version."""
    spec = find_spec("llvmlite")
    if spec is None or spec.origin is None:
        return []
    return sorted(path.name for path in Path(spec.origin).parents[1].glob("llvmlite-*"))


def cpu_name() -> str:
    """Return LLVM's name of the CPU; the environment may name another one."""
    import llvmlite.binding as llvm

    return os.environ.get("TGEN_CPU_NAME") or llvm.get_host_cpu_name()


def cpu_features() -> str:
    """Return the instruction sets that may be used, as LLVM lists them: +avx2,-avx512f,..."""
    import llvmlite.binding as llvm

    listed = os.environ.get("TGEN_CPU_FEATURES")
    return llvm.get_host_cpu_features().flatten() if listed is None else listed


def features() -> set[str]:
    """Return the names of the instruction sets that may be used."""
    return {one[1:] for one in cpu_features().split(",") if one.startswith("+")}


def has_float16() -> bool:
    """Whether instructions convert float16 to float32."""
    return ARM or bool({"f16c", "avx512f"} & features())


def multiplies_bfloat16() -> bool:
    """Whether vectors of bfloat16 pairs are multiplied faster than float32: on AMD's CPUs that can;
    Intel's instruction takes twice as long."""
    return "avx512bf16" in features() and cpu_name().startswith("znver")


def vector_registers() -> tuple[int, int]:
    """Return the number of registers, and how many of them hold a vector of 16 float32 numbers."""
    known = features()
    if "avx512f" in known:
        return 32, 1
    if "avx2" in known:
        return 16, 2
    return (32, 4) if ARM else (16, 4)
