"""The CPU that the kernels are compiled for: its vector registers and its integer instructions."""

import platform

import llvmlite.binding as llvm
import numba

X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
ARM = platform.machine().lower() in ("aarch64", "arm64")


def features() -> set[str]:
    """Return the names of the instruction sets that may be used."""
    listed = (numba.config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()).split(",")
    return {one[1:] for one in listed if one.startswith("+")}


def has_float16() -> bool:
    """Whether instructions convert float16 to float32."""
    return ARM or bool({"f16c", "avx512f"} & features())


def vector_registers() -> tuple[int, int]:
    """Return the number of registers, and how many of them hold a vector of 16 float32 numbers."""
    known = features()
    if "avx512f" in known:
        return 32, 1
    if "avx2" in known:
        return 16, 2
    return (32, 4) if ARM else (16, 4)
