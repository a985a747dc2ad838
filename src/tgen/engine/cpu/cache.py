"""Keys and values of the rows' positions so far, for the kernels: (L, B, n_kv_heads, S, D)."""

from collections.abc import Sequence

import numpy as np

from tgen.config import ModelConfig
from tgen.engine.cpu import forward
from tgen.engine.cpu.weights import Array, whole

_SMALLEST = 64


class Cache:
    """Storage doubles when it is full, up to the context."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.lengths = [0]
        self._allocate(1, 0)

    @property
    def bytes_held(self) -> int:
        """Bytes of the keys and values of the tokens held (not of the room around them)."""
        return sum(self.lengths) * self.config.cache_bytes_per_token

    def make_room(self, n_tokens: int) -> None:
        """Lets every row hold this many tokens."""
        capacity = self.keys.shape[3]
        if n_tokens > capacity:
            old = self.keys, self.values
            wanted = max(_SMALLEST, n_tokens, 2 * capacity)
            self._allocate(len(self.lengths), min(wanted, self.config.context_length))
            held = max(self.lengths)
            for target, source in zip((self.keys, self.values), old, strict=True):
                target[:, :, :, :held] = source[:, :, :, :held]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets each row's tokens from its new length on."""
        self.lengths = [
            max(0, min(old, new)) for old, new in zip(self.lengths, lengths, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> None:
        """Keeps, repeats and reorders rows."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        held, old = max(self.lengths), (self.keys, self.values)
        self._allocate(len(rows), self.keys.shape[3])
        for target, source in zip((self.keys, self.values), old, strict=True):
            for new, row in enumerate(rows):
                target[:, new, :, :held] = source[:, row, :, :held]

    def first_row(self) -> tuple[Array, Array]:
        """What the first row holds: keys and values, each (L, n_kv_heads, n, D)."""
        n, size = self.lengths[0], self.config.head_dim
        keys, values = (s[:, 0, :, :n, :size].copy() for s in (self.keys, self.values))
        return keys, values

    def restore(self, keys: Array, values: Array) -> None:
        """Leaves one row, which holds these, each (L, n_kv_heads, n, D)."""
        n, size = keys.shape[2:]
        self._allocate(1, n)
        self.keys[:, 0, :, :, :size], self.values[:, 0, :, :, :size] = keys, values
        self.lengths = [n]

    def facts(self) -> dict[int, int]:
        """The job's fields that follow from the storage."""
        return {
            forward.KEYS_AT: self.keys.ctypes.data,
            forward.VALUES_AT: self.values.ctypes.data,
            forward.CAPACITY: self.keys.shape[3],
            forward.N_ROWS: self.keys.shape[1],
        }

    def _allocate(self, n_rows: int, capacity: int) -> None:
        config = self.config
        shape = (config.n_layers, n_rows, config.n_kv_heads, capacity, whole(config.head_dim))
        # Memory that nothing has been written to costs nothing.
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
