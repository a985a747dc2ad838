"""Compiled sampling: the requests to `sampling_kernels`. Does not import LLVM."""

import sys
import threading
from collections.abc import Callable
from functools import cached_property

import numpy as np

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
        self,
        logits: Logits,
        uniforms: list[float],
        *,
        top_k: int,
        top_p: float,
        min_p: float,
        temperature: float,
    ) -> list[int]:
        """Sample a token per row of float32 logits (B, V) by top-k (0: all), top-p, min-p and
        temperature, above 0, in this order; -1 if the largest logit is not finite."""
        request = self._start(logits)
        request[TOP_K : TEMPERATURE + 1] = (
            min(top_k, logits.shape[1]),
            top_p,
            np.log(min_p) if min_p else -np.inf,
            temperature,
        )
        tokens = []
        for i, uniform in enumerate(uniforms):
            request[ROW_PTR] = self._rows + i * self._row_bytes
            request[UNIFORM] = uniform
            self._enter(SAMPLE, self._address, 0, 0, 0, 0, 0, 0)
            tokens.append(int(request[RESULT]))
        return tokens

    def describe(self, logits: Logits, tokens: list[int]) -> list[tuple[float, int, float]]:
        """Return a token's log-probability, how many are more likely, and the entropy in nats, per
        row of float32 logits (B, V)."""
        request = self._start(logits)
        described = []
        for i, token in enumerate(tokens):
            request[ROW_PTR] = self._rows + i * self._row_bytes
            request[TOKEN] = token
            self._enter(DESCRIBE, self._address, 0, 0, 0, 0, 0, 0)
            logprob, rank, entropy = request[RESULT:].tolist()
            described.append((logprob, int(rank), entropy))
        return described

    def _start(self, logits: Logits) -> np.ndarray:
        if logits.dtype != np.float32 or logits.strides[1] != 4:
            raise ValueError(f"rows of {logits.dtype} with strides {logits.strides}")
        n = logits.shape[1]
        if n > len(self._ids):
            self._resize(n)
        self._request[N_CANDIDATES] = n
        self._rows, self._row_bytes = logits.ctypes.data, logits.strides[0]
        return self._request

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
