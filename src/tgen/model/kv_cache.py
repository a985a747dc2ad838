"""The keys and values of the positions so far, so that a new token need not compute them again.

Causal attention lets no earlier position see a later one, so what a layer computed for a position
never changes. Rows may hold different numbers of tokens. Storage doubles when it is full.
"""

import torch
from torch import Tensor

from tgen.config import ModelConfig
from tgen.model.attention_mask import causal_mask


class KVCache:
    """What one model has seen of B rows. The model calls `extend` once, then `update` a layer."""

    def __init__(
        self, config: ModelConfig, n_rows: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.lengths = [0] * n_rows  # tokens held by each row
        self.window = config.sliding_window
        self._start = [0] * n_rows
        self._positions: Tensor | None = None  # (B, T) where rows differ
        shape = (n_rows, config.n_kv_heads, 0, config.head_dim)
        self.keys = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.n_layers)]
        self.values = [torch.empty_like(keys) for keys in self.keys]

    @property
    def bytes_held(self) -> int:
        """Bytes of the keys and values of the tokens held (not of the room around them)."""
        _, n_kv_heads, _, head_dim = self.keys[0].shape
        per_token = 2 * len(self.keys) * n_kv_heads * head_dim * self.keys[0].element_size()
        return sum(self.lengths) * per_token

    def extend(self, n_new: int) -> tuple[Tensor, Tensor | None]:
        """Makes room for `n_new` tokens in each row; their positions, (T,) or (B, T), and whom they
        see, (T, S) or (B, 1, T, S); None where that is all up to themselves."""
        device = self.keys[0].device
        self._start = list(self.lengths)
        end = max(self.lengths) + n_new
        self.reserve(end)
        new = torch.arange(n_new, device=device)
        self.lengths = [start + n_new for start in self._start]
        first = self._start[0]
        all_near = self.window is None or end <= self.window
        if all(start == first for start in self._start):
            self._positions, positions = None, first + new  # (T,)
            if all_near and (first == 0 or n_new == 1):
                return positions, None
            return positions, causal_mask(positions, end, self.window)
        self._positions = torch.tensor(self._start, device=device)[:, None] + new  # (B, T)
        return self._positions, causal_mask(self._positions, end, self.window)[:, None]

    def reserve(self, n: int) -> None:
        """Makes room for rows of `n` tokens."""
        if n > self.keys[0].shape[2]:
            self._grow(max(64, n, 2 * self.keys[0].shape[2]))

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v (B, n_kv_heads, T, D); gives all that is held, (B, n_kv_heads, S, D)."""
        keys, values = self.keys[layer], self.values[layer]
        end = max(self.lengths)
        if self._positions is None:
            keys[:, :, self._start[0] : end] = k
            values[:, :, self._start[0] : end] = v
        else:
            index = self._positions[:, None, :, None].expand_as(k)
            keys.scatter_(2, index, k.to(keys.dtype))
            values.scatter_(2, index, v.to(values.dtype))
        return keys[:, :, :end], values[:, :, :end]

    def rewind(self, lengths: list[int]) -> None:
        """Forgets each row's tokens from its new length on."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def select(self, rows: list[int]) -> None:
        """Keeps, repeats and reorders rows."""
        index = torch.tensor(rows, dtype=torch.long, device=self.keys[0].device)
        self.lengths = [self.lengths[row] for row in rows]
        self.keys = [keys[index] for keys in self.keys]
        self.values = [values[index] for values in self.values]

    def first_row(self) -> tuple[Tensor, Tensor]:
        """What the first row holds: keys and values, each (L, n_kv_heads, n, D)."""
        n = self.lengths[0]
        keys, values = ([layer[0, :, :n] for layer in s] for s in (self.keys, self.values))
        return torch.stack(keys), torch.stack(values)

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Leaves one row, which holds these, each (L, n_kv_heads, n, D)."""
        self.lengths = [keys.shape[2]]
        for store, given in ((self.keys, keys), (self.values, values)):
            store[:] = [layer[None].to(store[0], copy=True) for layer in given]

    def _grow(self, capacity: int) -> None:
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                B, H, S, D = old.shape
                store[layer] = old.new_zeros(B, H, capacity, D)
                store[layer][:, :, :S] = old
