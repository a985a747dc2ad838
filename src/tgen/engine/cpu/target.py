"""The CPU that the kernels are compiled for: its vector registers and its integer instructions."""

import os
import platform

import llvmlite.binding as llvm

X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
ARM = platform.machine().lower() in ("aarch64", "arm64")


def cpu_name() -> str:
    """Return LLVM's name of the CPU; the environment may name another one."""
    return os.environ.get("TGEN_CPU_NAME") or llvm.get_host_cpu_name()


def cpu_features() -> str:
    """Return the instruction sets that may be used, as LLVM lists them: +avx2,-avx512f,..."""
    listed = os.environ.get("TGEN_CPU_FEATURES")
    return llvm.get_host_cpu_features().flatten() if listed is None else listed


def features() -> set[str]:
    """Return the names of the instruction sets that may be used."""
    return {one[1:] for one in cpu_features().split(",") if one.startswith("+")}


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
