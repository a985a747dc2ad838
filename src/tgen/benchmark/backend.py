"""Workloads in llama-bench's terms (pp512, tg128, @ d4096), and the engines that run them.

A workload processes `n_prompt` tokens in one pass, then `n_gen` tokens one per pass, on top of
`n_depth` tokens in the KV cache. Only forward passes are timed. The token ids are random and made
beforehand, so sampling and tokenization do not count. After a warmup round, the workloads of all
backends are interleaved in alternating order: a slowdown of the machine affects all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tgen.engine.base import Engine, Logits, reset
from tgen.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Numbers of tokens to process."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    batch: int = 1  # sequences, each with this many tokens

    @property
    def label(self) -> str:
        """The name in llama-bench's notation."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        """Tokens per sequence at the end, including the depth."""
        return self.n_depth + self.n_prompt + self.n_gen

    def check(self, context_length: int) -> None:
        """Raise UsageError if the workload is empty or does not fit the context."""
        if self.batch < 1:
            raise UsageError(f"--batch: must be at least 1 (got {self.batch})", "use --batch 1")
        if self.n_prompt + self.n_gen == 0:
            raise UsageError("the benchmark has no tokens", "set -p or -n above 0")
        if self.n_tokens > context_length:
            raise UsageError(
                f"{self.label} needs {self.n_tokens:,} tokens, but the model's context has "
                f"{context_length:,}",
                "use a smaller -p, -n or -d",
            )


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
