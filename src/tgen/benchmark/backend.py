"""The engines that run workloads.

Only forward passes are timed. The token ids are random and made beforehand, so sampling and
tokenization do not count. After a warmup round, the workloads of all backends are interleaved in
alternating order: a slowdown of the machine affects all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from tgen.benchmark.workload import Workload
from tgen.engine.base import Engine, Logits, reset


class Backend(ABC):
    """A loaded model that runs a workload. Only `extend` is timed."""

    thread_pool: str  # backends with the same value share their threads

    @abstractmethod
    def prepare(self, workload: Workload) -> None:
        """Prepare `batch` sequences with `n_depth` cached tokens each; reuse a cached depth."""

    @abstractmethod
    def extend(self, n: int) -> None:
        """Process `n` more tokens per sequence, until the next token's logits are computed."""

    @abstractmethod
    def logits(self) -> Logits:
        """Return a copy of the logits after the last pass, (B, V), float32."""

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of cached keys and values; None if unknown."""
        return None


class EngineBackend(Backend):
    """One of tgen's engines."""

    def __init__(
        self, engine: Engine, tokens: Sequence[int], *, threads: int | None = None
    ) -> None:
        """Feed `tokens`, one context of ids. `threads` is for torch; None does not change them."""
        self.engine, self.tokens, self._threads = engine, list(tokens), threads
        self._logits: Logits = np.zeros((1, 0), np.float32)
        self.thread_pool = engine.name

    def prepare(self, workload: Workload) -> None:
        """See `Backend.prepare`."""
        if self.engine.name == "torch":  # its number of threads is global
            from tgen.machine.device import set_threads

            set_threads(self._threads)
        if len(self.engine.lengths) != workload.batch or self.engine.lengths[0] < workload.n_depth:
            reset(self.engine, workload.batch)
            if workload.n_depth:
                self.extend(workload.n_depth)
        self.engine.rewind([workload.n_depth] * workload.batch)

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of cached keys and values."""
        return self.engine.cache_bytes

    def logits(self) -> Logits:
        """See `Backend.logits`."""
        return self._logits

    def extend(self, n: int) -> None:
        """See `Backend.extend`."""
        lengths = self.engine.lengths
        tokens = self.tokens[lengths[0] : lengths[0] + n]
        self._logits = self.engine.extend([tokens] * len(lengths))


def random_tokens(vocab_size: int, n: int, *, seed: int) -> list[int]:
    """Return `n` random token ids: the input of every backend."""
    return [int(i) for i in np.random.default_rng(seed).integers(vocab_size, size=n)]
