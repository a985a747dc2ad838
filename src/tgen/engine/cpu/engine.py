"""The CPU engine: passes of up to 96 tokens through the compiled `forward`."""

import threading
from collections.abc import MutableMapping, Sequence
from copy import copy
from itertools import accumulate, chain, count, repeat
from typing import Self

import numpy as np

from tgen.checkpoint.dtypes import Array
from tgen.config import ModelConfig, StoredAs
from tgen.engine.base import Logits, extended_lengths
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.kv_cache import BlockedKVCache
from tgen.engine.cpu.pass_runner import MAX_TOKENS, PassRunner


class CpuEngine:
    """See `engine.base.Engine`. Logits do not depend on other sequences or the threads."""

    name = "kernels"

    def __init__(
        self,
        config: ModelConfig,
        arrays: MutableMapping[str, Array],
        *,
        n_threads: int,
        dtype: StoredAs = "float32",
    ) -> None:
        """Move the arrays out of `arrays`; raises ModelError: see `PassRunner`."""
        self.config, self.context_length = config, config.context_length
        self.dtype: StoredAs = dtype
        self._runner = PassRunner(config, arrays, n_threads=n_threads, dtype=dtype)
        self._lock = threading.Lock()  # guards the sequences of this engine
        self._cache = BlockedKVCache(config)

    def clone(self) -> Self:
        """Return an engine with the same weights and one empty sequence."""
        other = copy(self)
        other._lock, other._cache = threading.Lock(), BlockedKVCache(self.config)
        return other

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return list(self._cache.lengths)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cached keys and values."""
        return self._cache.used_bytes

    def extend(self, tokens: Sequence[Sequence[int]], *, every_position: bool = False) -> Logits:
        """Append tokens to each sequence; see `engine.base.Engine.extend`."""
        with self._lock:
            return self._extend(tokens, every_position)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence."""
        with self._lock:
            self._cache.rewind(lengths)

    def select(self, indices: Sequence[int]) -> None:
        """Select, repeat and reorder sequences."""
        with self._lock:
            self._cache.select(indices)

    def keys_and_values(self) -> tuple[Array, Array]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D)."""
        with self._lock:
            return self._cache.first_sequence()

    def restore(self, keys: Array, values: Array) -> None:
        """Replace everything with one sequence that has these keys and values."""
        with self._lock:
            self._cache.restore(keys, values)

    def _extend(self, tokens: Sequence[Sequence[int]], every_position: bool) -> Logits:
        before, counts = self.lengths, [len(new) for new in tokens]
        after = extended_lengths(before, counts, self.context_length)
        ids = list(chain.from_iterable(tokens))
        if min(ids) < 0 or max(ids) >= self.config.vocab_size:
            raise IndexError(f"a token is outside the vocabulary of {self.config.vocab_size}")
        self._cache.reserve(max(after))
        rows = np.empty((len(ids), job_layout.TOKEN_COLUMNS), np.int64)
        rows[:, job_layout.TOKEN_ID] = ids
        rows[:, job_layout.POSITION] = list(chain.from_iterable(map(range, before, after)))
        rows[:, job_layout.SEQUENCE] = list(chain.from_iterable(map(repeat, count(), counts)))
        rows[:, job_layout.NEEDS_LOGITS] = every_position
        rows[[end - 1 for end in accumulate(counts)], job_layout.NEEDS_LOGITS] = 1
        parts = [
            self._runner.run(self._cache, rows[i : i + MAX_TOKENS])
            for i in range(0, len(ids), MAX_TOKENS)
        ]
        self._cache.lengths = after
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
