"""Roofline: the shortest time in which this machine can run a workload.

A forward pass reads every weight once, and the keys and values of all earlier tokens that a layer
sees. It takes two operations per weight and token (for the output matrix: only for the last token
of a sequence) and four per query, visible key and head dimension. The slower of the two, at the
machine's peak memory bandwidth and compute rate, is the lower bound.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tgen.benchmark.workload import Workload
from tgen.config import STORED_BYTES, ModelConfig, StoredAs, output_dtype
from tgen.reports.benchmark import PeakRates

if TYPE_CHECKING:
    import torch

# Sides of the multiplied matrices: they occupy all of a CPU, or GPU, and its caches.
_SIDE, _GPU_SIDE = 768, 8192
_MIN_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Memory traffic and operations of a model's forward pass."""

    weights: int  # parameters that every token is multiplied with
    output_weights: int  # parameters that only the last token is multiplied with, for its logits
    weight_bytes: float  # bytes of both
    key_flops: int  # operations per query and key, over all layers
    key_bytes: float  # bytes of keys and values per token, over all layers
    windows: Mapping[int | None, float]  # fraction of the layers by their `ModelConfig.window`

    def min_seconds(self, workload: Workload, peak: PeakRates) -> tuple[float, str]:
        """Return the lower bound in seconds, and the resource that dominates it."""
        passes = [(workload.n_prompt, workload.n_depth)] if workload.n_prompt else []
        passes += [(1, workload.n_depth + workload.n_prompt + i) for i in range(workload.n_gen)]
        seconds = {"memory": 0.0, "compute": 0.0}
        for n, n_before in passes:
            n_pairs = n_read = 0.0  # of queries and keys; of keys
            for window, fraction in self.windows.items():
                pairs, read = _count_keys(n, n_before, window)
                n_pairs += fraction * pairs
                n_read += fraction * read
            matmul_flops = 2 * (n * self.weights + self.output_weights)
            flops = workload.batch * (matmul_flops + n_pairs * self.key_flops)
            n_bytes = self.weight_bytes + workload.batch * n_read * self.key_bytes
            slower = max(
                (n_bytes / peak.bytes_per_second, "memory"),
                (flops / peak.flops_per_second, "compute"),
            )
            seconds[slower[1]] += slower[0]
        return sum(seconds.values()), max(seconds, key=lambda name: seconds[name])


def _count_keys(n: int, n_before: int, window: int | None) -> tuple[int, int]:
    """Return the keys that `n` queries after `n_before` tokens see: summed over the queries, and
    those that any of them sees."""
    ends = range(n_before + 1, n_before + n + 1)
    if window is None:
        return sum(ends), n_before + n
    return sum(min(end, window) for end in ends), min(n_before, window - 1) + n


def pass_cost(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: StoredAs,
    *,
    cache_dtype: str = "float32",
) -> PassCost:
    """Return the cost of a model's forward passes, keys and values in a dtype.

    `shapes` maps tgen's names of the arrays to their shapes.
    """
    output = "token_embedding.weight" if config.tied_embeddings else "lm_head.weight"
    lookups = {"position_embedding.weight", "token_embedding.weight", output}
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    windows = [config.window(layer) for layer in range(config.n_layers)]
    weights = sum(size for name, size in matrices.items() if name not in lookups)
    output_weights = matrices[output]
    return PassCost(
        weights=weights,
        output_weights=output_weights,
        weight_bytes=weights * STORED_BYTES[dtype]
        + output_weights * STORED_BYTES[output_dtype(dtype)],
        key_flops=4 * config.n_layers * config.n_heads * config.head_dim,
        key_bytes=config.cache_bytes_per_token(cache_dtype),
        windows={window: n / config.n_layers for window, n in Counter(windows).items()},
    )


def measure_peak_rates(
    n_bytes: float, *, device: str, threads: int, dtype: StoredAs, seconds: float = 1.0
) -> PeakRates:
    """Measure the best of repeated reads of `n_bytes` and of repeated matrix products.

    Each takes `seconds`. The products are of the dtype that inputs are rounded to, or of float32 if
    those are faster. CPU caches are faster than memory, so the array is as large as the
    weights. One thread is tried too: when other processes run, several threads wait for each other.
    """
    import torch  # slow to import, and needed only here

    on_gpu = device != "cpu"
    n, side = max(int(n_bytes), _MIN_READ_BYTES), _GPU_SIDE if on_gpu else _SIDE
    data = torch.ones(n // 4, device=device)
    factors = [torch.ones(side, side, device=device, dtype=kind) for kind in _kinds(dtype, on_gpu)]
    read, multiply = [], []
    counts = sorted({1, threads}) if not on_gpu else [threads]
    for count in counts:
        torch.set_num_threads(count)
        read.append(_best_seconds(lambda: data.sum().item(), seconds / len(counts)))
        share = seconds / len(counts) / len(factors)
        multiply += [_best_seconds(partial(_multiply, factor), share) for factor in factors]
    return PeakRates(
        read_bytes=n,
        bytes_per_second=n / min(read),
        flops_per_second=2 * side**3 / min(multiply),
    )


def _kinds(dtype: StoredAs, on_gpu: bool) -> list["torch.dtype"]:
    """Return the dtypes whose products may be the fastest that a model of `dtype` can use."""
    import torch

    if on_gpu:
        return [getattr(torch, dtype)]
    small = {"bfloat16": [torch.bfloat16], "int8": [torch.int8], "int4": [torch.int8]}
    return [torch.float32, *small.get(dtype, [])]


def _multiply(factor: "torch.Tensor") -> object:
    import torch

    product = torch._int_mm(factor, factor) if factor.dtype == torch.int8 else factor @ factor
    return product[0, 0].item()


def _best_seconds(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of `work`, whose `item` call waits for the device."""
    work()
    end, best = time.perf_counter() + seconds, float("inf")
    while (begin := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - begin)
    return best
