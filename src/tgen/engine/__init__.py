"""Where the next token's logits come from."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from tgen.checkpoint.model_dir import ModelBundle
from tgen.config import StoredAs
from tgen.engine.base import Engine
from tgen.errors import UsageError
from tgen.model.cpu_count import cpu_count

EngineKind = Literal["auto", "kernels", "torch"]
# What Linux shows of a GPU that torch can use: NVIDIA's, AMD's, and those inside WSL.
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def open_engine(
    bundle: ModelBundle,
    *,
    device: str = "auto",
    threads: int | None = None,
    weights: StoredAs | None = None,
    kind: EngineKind = "auto",
) -> Engine:
    """An engine, with one empty row, that runs this model on `device`.

    On a processor compiled kernels compute, without torch; where they cannot be had, torch does,
    unless `kind` says who must.
    `weights` says how matrices are held in memory; None: as they are stored, but float16 as
    float32, and on torch without CUDA all as float32. The bundle's arrays go over to the engine.
    Raises UsageError if the device is not there or does not hold weights so.
    """
    if kind == "kernels":
        missing = missing_kernels() if device in ("auto", "cpu") else f"device is {device}"
        if missing:
            raise UsageError(f"--engine kernels cannot be had: {missing}", "try --engine torch")
        return _cpu_engine(bundle, threads, weights)
    if kind == "auto" and uses_kernels(device):
        return _cpu_engine(bundle, threads, weights)
    from tgen.engine.torch_engine import TorchEngine  # torch is loaded only when it is needed
    from tgen.model.device import choose_device, set_threads
    from tgen.model.transformer import Transformer

    chosen = choose_device(device)
    if chosen.type == "cpu" and missing_kernels() is None and kind == "auto":
        return _cpu_engine(bundle, threads, weights)
    if weights is None:
        weights = _as_stored(bundle) if chosen.type == "cuda" else "float32"
    if weights == "int8" or (weights == "bfloat16" and chosen.type != "cuda"):
        raise UsageError(
            f"--weights {weights} needs the compiled kernels, or for bfloat16 CUDA",
            missing_kernels() or "add --device cpu, or leave it away",
        )
    set_threads(threads)
    model = Transformer.from_arrays(bundle.config, bundle.arrays).to(chosen)
    return TorchEngine(model, stored=weights)


def uses_kernels(device: str) -> bool:
    """Whether it can be said without torch that compiled kernels will compute."""
    return on_processor(device) and missing_kernels() is None


def on_processor(device: str) -> bool:
    """Whether it can be said without torch that the processor will compute."""
    may_have_gpu = sys.platform in ("darwin", "win32") or any(Path(p).exists() for p in _GPUS)
    return device == "cpu" or (device == "auto" and not may_have_gpu)


@cache
def missing_kernels() -> str | None:
    """Why the compiled kernels cannot be had, or None."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set"
    if sys.platform == "win32":
        return "they need Linux or macOS"
    try:
        if not kernels_cached():
            import numba  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def kernels_cached() -> bool:
    """Whether the kernels were compiled before; if not, the first engine takes some seconds."""
    from tgen.engine.cpu.kernel_cache import kept

    return kept()


def compile_kernels() -> None:
    """Compiles what is not kept yet, some seconds long."""
    from tgen.engine.cpu.kernel_cache import kernels

    kernels()


def _cpu_engine(bundle: ModelBundle, threads: int | None, weights: StoredAs | None) -> Engine:
    from tgen.engine.cpu.engine import CpuEngine

    return CpuEngine(
        bundle.config,
        bundle.arrays,
        n_threads=min(threads or cpu_count(), cpu_count()),  # more would only wait
        stored=weights or _as_stored(bundle),
    )


def _as_stored(bundle: ModelBundle) -> StoredAs:
    matrices = {array.dtype for array in bundle.arrays.values() if array.ndim == 2}
    return "bfloat16" if matrices == {np.dtype(np.uint16)} else "float32"
