"""Keys and values of the rows' positions so far, for the kernels.

Values are (L, B, n_kv_heads, S, D). Keys are (L, B, n_kv_heads, S / 16, D, 16): sixteen positions
side by side, so that a query meets as many with one instruction.
"""

from collections.abc import Sequence

import numpy as np

from tgen.config import ModelConfig
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.job_layout import LANES
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

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""
        return int(self.values.shape[3])

    def make_room(self, n_tokens: int) -> None:
        """Lets every row hold this many tokens."""
        n_rows, capacity = self.values.shape[1], self.values.shape[3]
        if n_tokens > capacity:
            wanted = min(max(_SMALLEST, n_tokens, 2 * capacity), self.config.context_length)
            self._change(list(range(n_rows)), wanted)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets each row's tokens from its new length on."""
        self.lengths = [
            max(0, min(old, new)) for old, new in zip(self.lengths, lengths, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> None:
        """Keeps, repeats and reorders rows."""
        n, n_stored = len(rows), self.values.shape[1]
        # Rows that stay where they are need not be touched, if nothing is read after it was
        # written, and if the room that is left over is not too much.
        stay = all(row == i or row >= n or rows[row] == row for i, row in enumerate(rows))
        if stay and n <= n_stored <= 4 * n:
            for new, row in enumerate(rows):
                if new != row:
                    held, blocks = self.lengths[row], -(-self.lengths[row] // LANES)
                    self.keys[:, new, :, :blocks] = self.keys[:, row, :, :blocks]
                    self.values[:, new, :, :held] = self.values[:, row, :, :held]
            self.lengths = [self.lengths[row] for row in rows]
        else:
            self.lengths = [self.lengths[row] for row in rows]
            self._change(rows, self.values.shape[3])

    def first_row(self) -> tuple[Array, Array]:
        """What the first row holds: keys and values, each (L, n_kv_heads, n, D)."""
        n, size = self.lengths[0], self.config.head_dim
        keys = self.keys[:, 0].swapaxes(3, 4).reshape(self.values[:, 0].shape)
        return keys[:, :, :n, :size].copy(), self.values[:, 0, :, :n, :size].copy()

    def restore(self, keys: Array, values: Array) -> None:
        """Leaves one row, which holds these, each (L, n_kv_heads, n, D)."""
        n, size = keys.shape[2:]
        self._allocate(1, n)
        self.values[:, 0, :, :n, :size] = values
        apart = np.zeros_like(self.values[:, 0])
        apart[:, :, :n, :size] = keys
        blocks = self.keys[:, 0].swapaxes(3, 4)  # (L, n_kv_heads, S / 16, 16, D)
        blocks[:] = apart.reshape(blocks.shape)
        self.lengths = [n]

    def facts(self) -> dict[int, int]:
        """The job's fields that follow from the storage."""
        return {
            job_layout.KEYS_AT: self.keys.ctypes.data,
            job_layout.VALUES_AT: self.values.ctypes.data,
            job_layout.CAPACITY: self.values.shape[3],
            job_layout.N_ROWS: self.values.shape[1],
        }

    def _change(self, rows: Sequence[int], capacity: int) -> None:
        """New storage, in which these rows hold what they held."""
        keys, values, held = self.keys, self.values, max(self.lengths)
        blocks = -(-held // LANES)
        self._allocate(len(rows), capacity)
        for new, row in enumerate(rows):
            self.keys[:, new, :, :blocks] = keys[:, row, :, :blocks]
            self.values[:, new, :, :held] = values[:, row, :, :held]

    def _allocate(self, n_rows: int, capacity: int) -> None:
        config, n_blocks = self.config, -(-capacity // LANES)
        size = whole(config.head_dim)
        rows = (config.n_layers, n_rows, config.n_kv_heads)
        # Memory that nothing has been written to costs nothing.
        self.keys = np.zeros((*rows, n_blocks, size, LANES), np.float32)
        self.values = np.zeros((*rows, n_blocks * LANES, size), np.float32)
