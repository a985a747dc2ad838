"""What this machine's memory and arithmetic give at their best, measured on the spot."""

import time
from collections.abc import Callable

import torch

from tgen.config import StoredAs
from tgen.reports import Limits

# The sides of matrices that are multiplied: they fill a processor, or a GPU, and its caches.
_SIDE, _SIDE_ON_GPU = 768, 8192
_LEAST_READ = 1 << 20


def measure_limits(
    n_bytes: float, *, device: str, threads: int, stored: StoredAs, seconds: float = 1.0
) -> Limits:
    """The best of some reads of `n_bytes` and of some matrix products, `seconds` of each.

    What fits near a processor is read faster than memory gives: so as much is read as the weights.
    With one thread too: where something else runs, several wait for each other.
    """
    on_gpu = device != "cpu"
    kind = torch.bfloat16 if stored == "bfloat16" and on_gpu else torch.float32
    n, side = max(int(n_bytes), _LEAST_READ), _SIDE_ON_GPU if on_gpu else _SIDE
    held = torch.ones(n // 4, device=device)
    a = torch.ones(side, side, device=device, dtype=kind)
    read, multiply = [], []
    counts = sorted({1, threads}) if not on_gpu else [threads]
    for count in counts:
        torch.set_num_threads(count)
        read.append(_best(lambda: held.sum().item(), seconds / len(counts)))
        multiply.append(_best(lambda: (a @ a)[0, 0].item(), seconds / len(counts)))
    return Limits(
        read_bytes=n,
        bytes_per_second=n / min(read),
        flops=2 * side**3 / min(multiply),
    )


def _best(work: Callable[[], object], seconds: float) -> float:
    """The shortest time; `item` in the work waits for the device."""
    work()
    until, best = time.perf_counter() + seconds, float("inf")
    while (begin := time.perf_counter()) < until:
        work()
        best = min(best, time.perf_counter() - begin)
    return best
