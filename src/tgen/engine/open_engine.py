"""Open a model in the engine that the options choose, with cached weights if there are any."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tgen.checkpoint.model_dir import ModelBundle, kernels_dtype, stored_dtype
from tgen.config import DEFAULT_ENGINE, EngineOptions
from tgen.engine.base import Engine
from tgen.engine.choose_engine import (
    choose_engine,
    missing_kernels,
    prefers_kernels,
    runs_on_cpu,
)
from tgen.errors import UsageError
from tgen.machine.cpus import cpu_count, default_threads

if TYPE_CHECKING:
    from tgen.engine.cpu.weights import PackedWeights
    from tgen.engine.weights_cache import CachedWeights


def open_engine(
    bundle: ModelBundle,
    options: EngineOptions = DEFAULT_ENGINE,
    *,
    packed: "PackedWeights | None" = None,
) -> Engine:
    """Open an engine with one empty sequence; see `choose_engine`.

    `dtype` is how matrices are stored in memory. None means as in the file, except that the
    kernels store float16 as float32 and quantized files as int4 or int8, CUDA these as bfloat16,
    and that torch uses float32 without CUDA and instead of bfloat16 that a GPU only emulates.
    `cache_dtype` is how the kernels store keys and values: by default float32 beside float32
    weights, else float16. The engine takes ownership of the bundle's arrays; with `packed` weights,
    it is the kernels with these. Raises UsageError if the device is unavailable or does not support
    a dtype.
    """
    device: str = options.device
    threads, dtype, cache_dtype = options.threads, options.dtype, options.cache_dtype
    kind = options.kind if packed is None else "kernels"
    if device == "auto" and kind != "kernels":
        n_weights = sum(array.size for array in bundle.arrays.values())
        may_choose = kind == "auto" and dtype != "float16"
        small = may_choose and prefers_kernels(sys.platform, n_weights, missing_kernels())
        device = "cpu" if small or runs_on_cpu(device) else _detect_device()
    if dtype == "float16" and device != "cuda":
        raise UsageError("dtype float16 needs CUDA", "remove dtype", field="dtype")
    if choose_engine(kind, device, missing_kernels()) == "kernels":
        from tgen.engine.cpu.engine import CpuEngine
        from tgen.engine.cpu.weights import pack_weights

        n_threads = min(threads or default_threads(), cpu_count())  # more would only wait
        if packed is None:
            dtype = dtype or kernels_dtype(bundle)
            packed = pack_weights(bundle.config, bundle.arrays, dtype, n_threads=n_threads)
        return CpuEngine(packed, n_threads=n_threads, cache_dtype=cache_dtype)
    from tgen.engine.torch_engine import TorchEngine  # imports torch
    from tgen.machine.device import choose_device, set_threads
    from tgen.model.precision import computes_bfloat16
    from tgen.model.transformer import Transformer

    target = choose_device(device)
    if dtype is None:
        dtype = "bfloat16" if bundle.quantized else stored_dtype(bundle)
        is_slow = dtype == "bfloat16" and not computes_bfloat16(target)  # older GPUs emulate it
        if target.type != "cuda" or is_slow:
            dtype = "float32"
    reason = missing_kernels()
    why = f": {reason}" if reason else ""
    if dtype in ("int8", "int4") or (dtype == "bfloat16" and target.type != "cuda"):
        needed = "the compiled kernels or CUDA" if dtype == "bfloat16" else "the compiled kernels"
        hint = "set dtype to float32" if reason or kind == "torch" else "set device to cpu"
        if kind == "torch":
            why = " (got engine torch)"
        raise UsageError(f"dtype {dtype} needs {needed}{why}", hint, field="dtype")
    if cache_dtype is not None and cache_dtype != dtype:
        message = f"cache_dtype {cache_dtype} needs the compiled kernels{why}"
        raise UsageError(message, "remove cache_dtype", field="cache_dtype")
    set_threads(threads)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    return TorchEngine(model, dtype=dtype, device=target)


def find_cached(path: Path, options: EngineOptions) -> "CachedWeights | None":
    """Return a model's cached weights if the kernels will compute it, or None."""
    on_cpu = runs_on_cpu(options.device)
    if missing_kernels() is not None or not (on_cpu or options.device == "auto"):
        return None
    from tgen.engine.weights_cache import find

    cached = find(path, options.dtype)
    if cached and not on_cpu and not prefers_kernels(sys.platform, cached.n_weights, None):
        return None
    return cached


def prepare_store(
    bundle: ModelBundle, engine: Engine, *, n_weights: int, is_default: bool
) -> Callable[[], None] | None:
    """Return a function that stores the kernels' weights, see `weights_cache`; None for torch."""
    if engine.name != "kernels":
        return None
    from tgen.engine.cpu.engine import CpuEngine
    from tgen.engine.weights_cache import prepare_store

    assert isinstance(engine, CpuEngine)
    return prepare_store(bundle, engine.weights, n_weights=n_weights, is_default=is_default)


def _detect_device() -> str:
    from tgen.machine.device import choose_device

    return choose_device("auto").type
