"""Compiled sampling: the requests to `sampling_kernels`. Does not import LLVM."""

import ctypes
import sys
import threading
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Logits
from tgen.engine.cpu.job_layout import (
    CANDIDATE_LOGITS_PTR,
    CANDIDATES_PTR,
    DESCRIBE,
    LANES,
    LOG_MIN_P,
    N_CANDIDATES,
    REQUEST_SIZE,
    RESULT,
    ROW_PTR,
    SAMPLE,
    SAMPLE_POSITION,
    SAMPLE_SEED,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
)

_SAMPLERS = ["top_k", "top_p", "min_p", "temperature"]
_MAX_TOP_K = 1 << 53  # of a request's numbers
_MIN_TEMPERATURE = 1e-3  # of float32 exponents


class RowSampler:
    """Samples from rows of logits, in one thread. A token costs microseconds: the request, plain
    numbers for the kernels, stays filled in for the settings of the token before."""

    def __init__(self, enter: Callable[..., int]) -> None:
        # The tasks of sampling read the first two arguments; to pass all takes twice as long.
        kind = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 3)
        self._compute = kind(ctypes.cast(enter, ctypes.c_void_p).value)  # type: ignore[arg-type]
        self._request = array("d", bytes(8 * REQUEST_SIZE))
        self._integers = memoryview(self._request).cast("B").cast("q")
        self._address = self._request.buffer_info()[0]
        self._sampling: SamplingConfig | None = None  # of the last token
        self._is_compiled = False
        self._resize(1)

    def accepts(self, sampling: SamplingConfig) -> bool:
        """Return whether only top-k, top-p, min-p and temperature are active, in this order; if so,
        they are the settings of `sample`."""
        if sampling is not self._sampling:
            self._sampling, self._is_compiled = sampling, _is_compiled(sampling)
            greedy = sampling.temperature == 0
            self._request[TOP_K] = 1 if greedy else min(sampling.top_k, _MAX_TOP_K)
            self._request[TOP_P] = sampling.top_p
            self._request[LOG_MIN_P] = np.log(sampling.min_p) if sampling.min_p else -np.inf
            self._request[TEMPERATURE] = 1 if greedy else sampling.temperature
        return self._is_compiled

    def sample(self, logits: Logits, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Sample a token per row of float32 logits (B, V), with the settings that were accepted
        last and the random numbers of the seeds and positions; -1 if the largest logit is not
        finite."""
        request, row_bytes = self._begin(logits), logits.strides[0]
        tokens = []
        for seed, position in zip(seeds, positions, strict=True):
            self._integers[SAMPLE_SEED], self._integers[SAMPLE_POSITION] = seed, position
            self._compute(SAMPLE, self._address)
            tokens.append(int(request[RESULT]))
            request[ROW_PTR] += row_bytes
        return tokens

    def prepare(self, logits: Logits, seed: int, position: int) -> int:
        """Return the address of a request to sample from the only row of float32 logits (1, V), now
        or when it is filled in."""
        self._begin(logits)
        self._integers[SAMPLE_SEED], self._integers[SAMPLE_POSITION] = seed, position
        return self._address

    def describe(self, logits: Logits, tokens: Sequence[int]) -> list[tuple[float, int, float]]:
        """Return a token's log-probability, how many are more likely, and the entropy in nats, per
        row of float32 logits (B, V)."""
        request, row_bytes = self._begin(logits), logits.strides[0]
        results = []
        for token in tokens:
            request[TOKEN] = token
            self._compute(DESCRIBE, self._address)
            logprob, rank, entropy = request[RESULT:]
            results.append((logprob, int(rank), entropy))
            request[ROW_PTR] += row_bytes
        return results

    def _begin(self, logits: Logits) -> "array[float]":
        """Return the request for the first row."""
        if logits.dtype != np.float32 or logits.strides[1] != 4:
            raise ValueError(f"rows of {logits.dtype} with strides {logits.strides}")
        n = logits.shape[1]
        if n > len(self._ids):
            self._resize(n)
        self._request[ROW_PTR], self._request[N_CANDIDATES] = _find_address(logits), n
        return self._request

    def _resize(self, n: int) -> None:
        self._ids, self._values = np.zeros(n, np.int64), np.zeros(n + LANES, np.float32)
        self._request[CANDIDATES_PTR] = self._ids.ctypes.data
        self._request[CANDIDATE_LOGITS_PTR] = self._values.ctypes.data


def _find_address(logits: Logits) -> int:
    try:  # takes a third of the time of `.ctypes.data`
        return ctypes.addressof(ctypes.c_char.from_buffer(logits))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, or rows with gaps between them
        return logits.ctypes.data


def _is_compiled(sampling: SamplingConfig) -> bool:
    return (
        [name for name in sampling.samplers if name in _SAMPLERS] == _SAMPLERS
        and sampling.typical_p == 1
        and not sampling.top_n_sigma
        and not sampling.xtc_probability
        and (
            _MIN_TEMPERATURE <= sampling.temperature <= 1 / _MIN_TEMPERATURE
            or not sampling.temperature
        )
    )


_of_thread = threading.local()


def row_sampler() -> RowSampler | None:
    """The sampler of this thread, if this process has loaded the kernels."""
    sampler: RowSampler | None = getattr(_of_thread, "sampler", None)
    if sampler is None:
        module = sys.modules.get("tgen.engine.cpu.kernel_cache")  # not imported without llvmlite
        if enter := module and module.loaded_enter():
            sampler = _of_thread.sampler = RowSampler(enter)
    return sampler
