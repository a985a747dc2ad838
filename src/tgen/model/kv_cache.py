"""The KV cache: keys and values of earlier positions, so that a new token need not compute them.

With causal attention no position sees a later one, so the keys and values of a position never
change. Sequences may have different lengths. Storage doubles when it is full.
"""

import torch
from torch import Tensor

from tgen.config import ModelConfig
from tgen.model.attention_mask import causal_mask


class KVCache:
    """Cached keys and values of B sequences.

    A forward pass calls `extend` once, then `update` once per layer.
    """

    def __init__(
        self, config: ModelConfig, n_sequences: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.lengths = [0] * n_sequences
        self.window = config.sliding_window
        self._start = [0] * n_sequences
        self._positions: Tensor | None = None  # (B, T) if the lengths differ
        shape = (n_sequences, config.n_kv_heads, 0, config.head_dim)
        self.keys = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.n_layers)]
        self.values = [torch.empty_like(keys) for keys in self.keys]

    @property
    def used_bytes(self) -> int:
        """Bytes of the cached tokens' keys and values, without unused capacity."""
        _, n_kv_heads, _, head_dim = self.keys[0].shape
        per_token = 2 * len(self.keys) * n_kv_heads * head_dim * self.keys[0].element_size()
        return sum(self.lengths) * per_token

    def extend(self, n_new: int) -> tuple[Tensor, Tensor | None]:
        """Make room for `n_new` tokens per sequence.

        Returns their positions, (T,) or (B, T), and the attention mask, (T, S) or (B, 1, T, S), or
        None for plain causal attention.
        """
        device = self.keys[0].device
        self._start = list(self.lengths)
        end = max(self.lengths) + n_new
        self.reserve(end)
        new = torch.arange(n_new, device=device)
        self.lengths = [start + n_new for start in self._start]
        first = self._start[0]
        if all(start == first for start in self._start):
            self._positions, positions = None, first + new  # (T,)
            within_window = self.window is None or end <= self.window
            if within_window and (first == 0 or n_new == 1):
                return positions, None
            return positions, causal_mask(positions, end, self.window)
        self._positions = torch.tensor(self._start, device=device)[:, None] + new  # (B, T)
        return self._positions, causal_mask(self._positions, end, self.window)[:, None]

    def reserve(self, n: int) -> None:
        """Make room for sequences of `n` tokens."""
        old_capacity = self.keys[0].shape[2]
        if n <= old_capacity:
            return
        capacity = max(64, n, 2 * old_capacity)
        for storage in (self.keys, self.values):
            for layer, old in enumerate(storage):
                B, H, S, D = old.shape
                storage[layer] = old.new_zeros(B, H, capacity, D)
                storage[layer][:, :, :S] = old

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, n_kv_heads, T, D); return all keys and values (B, n_kv_heads, S, D)."""
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
        """Truncate each sequence to its new length, if it is longer."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def select(self, indices: list[int]) -> None:
        """Select, repeat and reorder sequences: new sequence i is old sequence indices[i]."""
        index = torch.tensor(indices, dtype=torch.long, device=self.keys[0].device)
        self.lengths = [self.lengths[i] for i in indices]
        self.keys = [keys[index] for keys in self.keys]
        self.values = [values[index] for values in self.values]

    def first_sequence(self) -> tuple[Tensor, Tensor]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D)."""
        n = self.lengths[0]
        keys, values = ([layer[0, :, :n] for layer in s] for s in (self.keys, self.values))
        return torch.stack(keys), torch.stack(values)

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Replace everything with one sequence of keys and values (L, n_kv_heads, n, D)."""
        self.lengths = [keys.shape[2]]
        for storage, new in ((self.keys, keys), (self.values, values)):
            storage[:] = [layer[None].to(storage[0], copy=True) for layer in new]
