"""The CPU engine: passes of up to `MAX_TOKENS` tokens through the compiled `forward`."""

import threading
from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np

from tgen.checkpoint.dtypes import Array
from tgen.config import CacheDtype, StoredAs
from tgen.engine.base import Logits, extended_lengths
from tgen.engine.cpu.kernel_cache import load_kernels
from tgen.engine.cpu.kv_cache import BlockedKVCache
from tgen.engine.cpu.pass_runner import MAX_TOKENS, PassRunner
from tgen.engine.cpu.weights import PackedWeights


class CpuEngine:
    """See `engine.base.Engine`. Logits do not depend on other sequences or the threads."""

    name = "kernels"

    def __init__(
        self, weights: PackedWeights, *, n_threads: int, cache_dtype: CacheDtype | None = None
    ) -> None:
        """Keys and values are stored in float32 by default, or in float16 if the weights are
        smaller. Raises ModelError: see `PassRunner`."""
        self.config = config = weights.config
        self.context_length = config.context_length
        self.dtype: StoredAs = weights.dtype
        default: CacheDtype = "float32" if self.dtype == "float32" else "float16"
        self.cache_dtype = cache_dtype or default
        self._runner = PassRunner(weights, n_threads=n_threads)
        self._lock = threading.Lock()  # guards the sequences of this engine
        self._cache = BlockedKVCache(config, self.cache_dtype)
        load_kernels((self.weights.input_dtype, self._cache.dtype_code))

    @property
    def weights(self) -> PackedWeights:
        """The weights, which all clones share."""
        return self._runner.weights

    def clone(self) -> Self:
        """Return an engine with the same weights and one empty sequence."""
        other = copy(self)
        other._lock = threading.Lock()
        other._cache = BlockedKVCache(self.config, self.cache_dtype)
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

    def select(self, indices: Sequence[int], lengths: Sequence[int] | None = None) -> None:
        """Select, repeat and reorder sequences."""
        with self._lock:
            self._cache.select(indices, lengths)

    def check_room(self, lengths: Sequence[int]) -> None:
        """Raise ModelError unless sequences of these lengths fit; see `engine.base.Engine`."""
        self._cache.check_room(lengths)

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
        rows: list[tuple[int, ...]] = []  # see `job_layout`
        for i, new in enumerate(tokens):
            if min(new) < 0 or max(new) >= self.config.vocab_size:
                raise IndexError(f"a token is outside the vocabulary of {self.config.vocab_size}")
            last = after[i] - 1
            rows += [
                (token, position, i, every_position or position == last)
                for position, token in enumerate(new, before[i])
            ]
        self._cache.reserve(after)
        parts = [
            self._runner.run(self._cache, rows[i : i + MAX_TOKENS])
            for i in range(0, len(rows), MAX_TOKENS)
        ]
        self._cache.lengths = after
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
