"""The KV cache in the kernels' layout.

Values are (L, B, n_kv_heads, S, D). Keys are (L, B, n_kv_heads, S / 16, D, 16): one vector
instruction multiplies a number of the query with 16 positions.
"""

from collections.abc import Sequence

import numpy as np

from tgen.checkpoint.dtypes import Array
from tgen.config import CacheDtype, ModelConfig
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.job_layout import LANES, allocate_aligned
from tgen.engine.cpu.weights import padded_length
from tgen.machine.memory import check_kv_cache_ram

_MIN_CAPACITY = 64
_DTYPES = {"float32": job_layout.FLOAT32, "float16": job_layout.FLOAT16}


class BlockedKVCache:
    """Keys and values of B sequences. Storage doubles when it is full, up to the context length."""

    def __init__(self, config: ModelConfig, dtype: CacheDtype = "float32") -> None:
        self.config, self.dtype = config, np.dtype(dtype)
        self.dtype_code = _DTYPES[dtype]  # see `job_layout`
        self.lengths = [0]
        self.keys, self.values = self._allocate(1, 0)

    @property
    def used_bytes(self) -> int:
        """Bytes of the cached tokens' keys and values, without unused capacity."""
        return sum(self.lengths) * self.config.cache_bytes_per_token * self.dtype.itemsize // 4

    @property
    def capacity(self) -> int:
        """Tokens per sequence that fit without reallocation."""
        return int(self.values.shape[3])

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` tokens in every sequence."""
        if n_tokens > self.capacity:
            wanted = min(
                max(_MIN_CAPACITY, n_tokens, 2 * self.capacity), self.config.context_length
            )
            everything = list(range(len(self.lengths)))
            self.keys, self.values = self._copy(everything, wanted)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence to its new length, if it is longer."""
        self.lengths = [
            max(0, min(old, new)) for old, new in zip(self.lengths, lengths, strict=True)
        ]

    def select(self, indices: Sequence[int]) -> None:
        """Select, repeat and reorder sequences: new sequence i is old sequence indices[i]."""
        n, n_stored = len(indices), self.values.shape[1]
        # Copy within the storage if no source is overwritten before it is copied, and if the
        # storage is not more than four times too large.
        in_place = all(old == i or old >= n or indices[old] == old for i, old in enumerate(indices))
        lengths = [self.lengths[old] for old in indices]
        if in_place and n <= n_stored <= 4 * n:
            for new, old in enumerate(indices):
                if new != old:
                    blocks = -(-lengths[new] // LANES)
                    self.keys[:, new, :, :blocks] = self.keys[:, old, :, :blocks]
                    self.values[:, new, :, : lengths[new]] = self.values[:, old, :, : lengths[new]]
            self.lengths = lengths
        else:
            keys, values = self._copy(indices, self.capacity)
            self.keys, self.values, self.lengths = keys, values, lengths

    def first_sequence(self) -> tuple[Array, Array]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D), float32."""
        n, size = self.lengths[0], self.config.head_dim
        keys = self.keys[:, 0].swapaxes(3, 4).reshape(self.values[:, 0].shape)
        both = keys[:, :, :n, :size], self.values[:, 0, :, :n, :size]
        return both[0].astype(np.float32), both[1].astype(np.float32)

    def restore(self, keys: Array, values: Array) -> None:
        """Replace everything with one sequence of keys and values (L, n_kv_heads, n, D)."""
        n, size = keys.shape[2:]
        new_keys, new_values = self._allocate(1, n)
        new_values[:, 0, :, :n, :size] = values
        padded = np.zeros_like(new_values[:, 0])
        padded[:, :, :n, :size] = keys
        blocks = new_keys[:, 0].swapaxes(3, 4)  # (L, n_kv_heads, S / 16, 16, D)
        blocks[:] = padded.reshape(blocks.shape)
        self.keys, self.values, self.lengths = new_keys, new_values, [n]

    def job_fields(self) -> dict[int, int]:
        """Return the job's fields that depend on the storage."""
        return {
            job_layout.KEYS_PTR: self.keys.ctypes.data,
            job_layout.VALUES_PTR: self.values.ctypes.data,
            job_layout.CAPACITY: self.capacity,
            job_layout.N_SEQUENCES: self.values.shape[1],
        }

    def _copy(self, indices: Sequence[int], capacity: int) -> tuple[Array, Array]:
        """Return new storage with the tokens of these sequences.

        The caller assigns keys, values and lengths in one statement, which Ctrl-C cannot split.
        """
        keys, values = self._allocate(len(indices), capacity)
        for new, old in enumerate(indices):
            n = self.lengths[old]
            blocks = -(-n // LANES)
            keys[:, new, :, :blocks] = self.keys[:, old, :, :blocks]
            values[:, new, :, :n] = self.values[:, old, :, :n]
        return keys, values

    def _allocate(self, n_sequences: int, capacity: int) -> tuple[Array, Array]:
        config, n_blocks = self.config, -(-capacity // LANES)
        size = padded_length(config.head_dim)
        shape = (config.n_layers, n_sequences, config.n_kv_heads)
        per_token = 2 * config.n_layers * config.n_kv_heads * size * self.dtype.itemsize
        check_kv_cache_ram(n_sequences, n_blocks * LANES, per_token)
        keys = allocate_aligned((*shape, n_blocks, size, LANES), self.dtype)
        values = allocate_aligned((*shape, n_blocks * LANES, size), self.dtype)
        return keys, values
