"""Compiled sampling: the requests to `sampling_kernels`. Does not import LLVM."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Logits
from tgen.engine.cpu.job_layout import (
    CANDIDATE_LOGITS_PTR,
    CANDIDATES_PTR,
    DESCRIBE,
    N_CANDIDATES,
    REQUEST_SIZE,
    RESULT,
    ROW_PTR,
    SAMPLE,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    UNIFORM,
)


class RowSampler(threading.local):
    """Samples from rows of logits; each thread has its own memory."""

    def __init__(self) -> None:
        self._request = np.zeros(REQUEST_SIZE, np.float64)
        self._address = self._request.ctypes.data
        self._resize(1)

    @cached_property
    def _enter(self) -> Callable[..., int]:
        enter = _loaded_kernels()
        assert enter is not None
        return enter

    def sample(
        self, logits: Logits, uniforms: Sequence[float], sampling: SamplingConfig
    ) -> list[int]:
        """Sample a token per row of float32 logits (B, V) by top-k, top-p, min-p and temperature,
        above 0, in this order; -1 if the largest logit is not finite."""
        self._request[TOP_K : TEMPERATURE + 1] = (
            min(sampling.top_k, logits.shape[1]),
            sampling.top_p,
            np.log(sampling.min_p) if sampling.min_p else -np.inf,
            sampling.temperature,
        )
        return [int(result[0]) for result in self._run(SAMPLE, logits, UNIFORM, uniforms)]

    def describe(self, logits: Logits, tokens: Sequence[int]) -> list[tuple[float, int, float]]:
        """Return a token's log-probability, how many are more likely, and the entropy in nats, per
        row of float32 logits (B, V)."""
        results = [result.tolist() for result in self._run(DESCRIBE, logits, TOKEN, tokens)]
        return [(logprob, int(rank), entropy) for logprob, rank, entropy in results]

    def _run(
        self, kernel: int, logits: Logits, argument: int, values: Sequence[float]
    ) -> Iterator[np.ndarray]:
        """Call a kernel per row of logits, with its value as `argument`; yield the results."""
        if logits.dtype != np.float32 or logits.strides[1] != 4:
            raise ValueError(f"rows of {logits.dtype} with strides {logits.strides}")
        n = logits.shape[1]
        if n > len(self._ids):
            self._resize(n)
        request, first_row, row_bytes = self._request, logits.ctypes.data, logits.strides[0]
        request[N_CANDIDATES] = n
        for i, value in enumerate(values):
            request[ROW_PTR] = first_row + i * row_bytes
            request[argument] = value
            self._enter(kernel, self._address, 0, 0, 0, 0, 0, 0)
            yield request[RESULT:]

    def _resize(self, n: int) -> None:
        self._ids, self._values = np.zeros(n, np.int64), np.zeros(n, np.float32)
        self._request[CANDIDATES_PTR] = self._ids.ctypes.data
        self._request[CANDIDATE_LOGITS_PTR] = self._values.ctypes.data


_sampler = RowSampler()


def row_sampler() -> RowSampler | None:
    """The sampler, if this process has loaded the kernels."""
    return _sampler if _loaded_kernels() else None


def _loaded_kernels() -> Callable[..., int] | None:
    module = sys.modules.get("tgen.engine.cpu.kernel_cache")  # not imported without llvmlite
    return module.loaded_enter() if module else None
