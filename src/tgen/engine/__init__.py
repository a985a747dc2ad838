"""Where the next token's logits come from."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tgen.checkpoint.directory import ModelBundle
from tgen.config import Weights
from tgen.engine.base import Engine
from tgen.errors import UsageError


def open_engine(
    bundle: ModelBundle,
    *,
    device: str = "auto",
    threads: int | None = None,
    weights: Weights = "auto",
) -> Engine:
    """An engine, with one empty row, that runs this model on `device`.

    On a processor compiled kernels compute, without torch; where they cannot be had, torch does.
    `weights` says how matrices are held in memory; auto: as they are stored. Raises UsageError if
    the device is not there or does not hold weights so.
    """
    if uses_kernels(device):
        return _cpu_engine(bundle, threads, weights)
    from tgen.engine.torch_engine import TorchEngine  # torch is loaded only when it is needed
    from tgen.model.device import choose_device, set_threads
    from tgen.model.transformer import Transformer

    chosen = choose_device(device)
    if chosen.type == "cpu" and missing_kernels() is None:
        return _cpu_engine(bundle, threads, weights)
    if weights not in ("auto", "float32"):
        raise UsageError(f"--weights {weights} needs the compiled kernels", "add --device cpu")
    set_threads(threads)
    return TorchEngine(Transformer.from_arrays(bundle.config, bundle.arrays).to(chosen))


def uses_kernels(device: str) -> bool:
    """Whether it can be said without torch that compiled kernels will compute."""
    on_processor = device == "cpu" or (device == "auto" and not _may_have_gpu())
    return on_processor and missing_kernels() is None


def missing_kernels() -> str | None:
    """Why the compiled kernels cannot be had, or None."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set"
    if sys.platform == "win32":
        return "they need Linux or macOS"
    return None if find_spec("numba") else "the package numba is not installed"


def kernels_are_kept() -> bool:
    """Whether the kernels were compiled before; if not, the first engine takes some seconds."""
    from tgen.engine.cpu.compiled import kept

    return kept()


def compile_kernels() -> None:
    """Compiles what is not kept yet, some seconds long."""
    import tgen.engine.cpu.threads  # noqa: F401


def _cpu_engine(bundle: ModelBundle, threads: int | None, weights: Weights) -> Engine:
    from tgen.engine.cpu.engine import CpuEngine

    if weights == "auto":
        matrices = {array.dtype for array in bundle.arrays.values() if array.ndim == 2}
        weights = "bfloat16" if matrices == {np.dtype(np.uint16)} else "float32"
    n_threads = threads or _processors()
    return CpuEngine(bundle.config, bundle.arrays, n_threads=n_threads, stored=weights)


def _processors() -> int:
    """Those that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _may_have_gpu() -> bool:
    """Whether it is worth loading torch to ask."""
    return sys.platform == "darwin" or Path("/dev/nvidiactl").exists()
