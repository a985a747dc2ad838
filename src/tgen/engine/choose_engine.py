"""The kernels or torch: the engine for a model, from its size, the device and the machine."""

import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tgen.config import EngineKind
from tgen.errors import UsageError

# Weights of a model that the kernels compute although there may be a GPU. On a Mac, torch takes
# seconds to import, and launching operations takes most of a small model's time. An H200's host
# with 16 cores decoded one text with 12 M weights 1.2 to 2.1 times as fast as the GPU, and started
# 4 s earlier.
_SMALL_MODELS = {"darwin": 500_000_000, "linux": 20_000_000}
# Linux device files of GPUs that torch can use: NVIDIA's, AMD's, and GPUs inside WSL.
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def choose_engine(
    kind: EngineKind, device: str, missing: str | None
) -> Literal["kernels", "torch"]:
    """Resolve an engine kind and a device to one of the two engines.

    `device` is "auto" only if the kind is "kernels". `missing` says why the kernels cannot be used,
    if so. Raises UsageError if the kind is "kernels" and they cannot be used.
    """
    if kind == "kernels":
        reason = missing if device in ("auto", "cpu") else f"kernels do not run on {device}"
        if reason:
            raise UsageError(f"--engine kernels is not available: {reason}", "use --engine torch")
        return "kernels"
    return "kernels" if kind == "auto" and device == "cpu" and missing is None else "torch"


def prefers_kernels(platform: str, n_weights: int, missing: str | None) -> bool:
    """Whether the kernels are the default although there may be a GPU: see `_SMALL_MODELS`."""
    return n_weights < _SMALL_MODELS.get(platform, 0) and missing is None


def runs_on_cpu(device: str) -> bool:
    """Whether `device` means the CPU, as far as known without importing torch."""
    may_have_gpu = sys.platform in ("darwin", "win32") or any(Path(p).exists() for p in _GPU_FILES)
    return device == "cpu" or (device == "auto" and not may_have_gpu)


@cache
def missing_kernels() -> str | None:
    """Return why the compiled kernels are not available, or None if they are."""
    if os.environ.get("TGEN_KERNELS") == "0":
        return "TGEN_KERNELS is 0"
    if sys.platform == "win32":
        return "kernels need Linux or macOS"
    return None if find_spec("llvmlite") else "llvmlite is not installed"
