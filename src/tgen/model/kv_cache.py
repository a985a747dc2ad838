"""The KV cache: keys and values of earlier positions, so that a new token need not compute them.

With causal attention no position sees a later one, so the keys and values of a position never
change. Sequences may have different lengths. Storage doubles when it is full, up to the context
length, and stays when sequences end.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tgen.config import ModelConfig
from tgen.machine.memory import check_kv_cache_ram
from tgen.model.attention import causal_mask

_MIN_CAPACITY = 64


class KVCache:
    """Cached keys and values of B sequences, the first B of the storage.

    A forward pass calls `extend` once, `mask` for each width of a window, then `update` once per
    layer.
    """

    def __init__(
        self, config: ModelConfig, n_sequences: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.lengths = [0] * n_sequences
        self.context_length = config.context_length
        # Assigned after all layers have changed, so that Ctrl-C does not leave them wrong.
        self.n_stored, self.capacity = n_sequences, 0
        self._start = [0] * n_sequences
        self._positions: Tensor | None = None  # (B, T) if the lengths differ
        shape = (n_sequences, config.n_kv_heads, 0, config.head_dim)
        self.keys = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.n_layers)]
        self.values = [torch.empty_like(keys) for keys in self.keys]

    @property
    def used_bytes(self) -> int:
        """Bytes of the cached tokens' keys and values, without unused capacity."""
        return sum(self.lengths) * self._bytes_per_token

    def extend(self, n_new: int) -> Tensor:
        """Make room for `n_new` tokens per sequence; return their positions, (T,) or (B, T)."""
        device = self.keys[0].device
        self._start = list(self.lengths)
        end = max(self.lengths) + n_new
        self.reserve(end)
        new = torch.arange(n_new, device=device)
        self.lengths = [start + n_new for start in self._start]
        first = self._start[0]
        if all(start == first for start in self._start):
            self._positions = None
            return first + new  # (T,)
        self._positions = torch.tensor(self._start, device=device)[:, None] + new  # (B, T)
        return self._positions

    def mask(self, window: int | None) -> Tensor | None:
        """Return the mask of the tokens of `extend`, (T, S) or (B, 1, T, S); None: plain causal
        attention."""
        end, start = max(self.lengths), self._start[0]
        if self._positions is not None:
            return causal_mask(self._positions, end, window)[:, None]
        if (window is None or end <= window) and (start == 0 or end - start == 1):
            return None
        return causal_mask(torch.arange(start, end, device=self.keys[0].device), end, window)

    def reserve(self, n: int) -> None:
        """Make room for sequences of `n` tokens."""
        if n <= self.capacity:
            return
        capacity = max(n, min(max(_MIN_CAPACITY, 2 * self.capacity), self.context_length))
        old_capacity = self.capacity
        self._check_ram(self.n_stored, capacity)

        def grow(old: Tensor) -> Tensor:
            B, H, _, D = old.shape
            new = old.new_zeros(B, H, capacity, D)
            new[:, :, :old_capacity] = old[:, :, :old_capacity]
            return new

        self._replace(grow)
        self.capacity = capacity

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, n_kv_heads, T, D); return all keys and values (B, n_kv_heads, S, D)."""
        B, end = len(self.lengths), max(self.lengths)
        keys, values = self.keys[layer][:B], self.values[layer][:B]
        if self._positions is None:
            keys[:, :, self._start[0] : end] = k
            values[:, :, self._start[0] : end] = v
        else:
            index = self._positions[:, None, :, None].expand_as(k)
            keys.scatter_(2, index, k.to(keys.dtype))
            values.scatter_(2, index, v.to(values.dtype))
        return keys[:, :, :end], values[:, :, :end]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence to its new length, if it is longer."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def select(self, indices: list[int]) -> None:
        """Select, repeat and reorder sequences: new sequence i is old sequence indices[i].

        Copies only the sequences that move, unless the storage is too small or more than four
        times too large.
        """
        n, lengths = len(indices), [self.lengths[i] for i in indices]
        longest, device = max(lengths), self.keys[0].device
        if n <= self.n_stored <= 4 * n:
            moves = [(new, old) for new, old in enumerate(indices) if new != old]
            if moves and longest:
                new, old = torch.tensor(moves, device=device).T
                for storage in (*self.keys, *self.values):
                    storage[new, :, :longest] = storage[old, :, :longest]
        else:
            index = torch.tensor(indices, device=device)
            self._check_ram(n, self.capacity)

            def pick(old: Tensor) -> Tensor:
                new = old.new_zeros(n, *old.shape[1:])
                new[:, :, :longest] = old[index, :, :longest]
                return new

            self.n_stored = 0  # until every layer has its new storage
            self._replace(pick)
            self.n_stored = n
        self.lengths = lengths

    def check_room(self, lengths: Sequence[int]) -> None:
        """Raise ModelError unless sequences of these lengths fit the RAM, each with the storage of
        the longest."""
        longest = min(max(_MIN_CAPACITY, 2 * max(lengths)), self.context_length)
        self._check_ram(len(lengths), longest)

    def first_sequence(self) -> tuple[Tensor, Tensor]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D)."""
        n = self.lengths[0]
        keys, values = ([layer[0, :, :n] for layer in s] for s in (self.keys, self.values))
        return torch.stack(keys), torch.stack(values)

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Replace everything with one sequence of keys and values (L, n_kv_heads, n, D)."""
        like, n = self.keys[0], keys.shape[2]
        new_keys, new_values = (
            [layer[None].to(like, copy=True) for layer in new] for new in (keys, values)
        )
        self.keys, self.values, self.lengths = new_keys, new_values, [n]
        self.n_stored, self.capacity = 1, n

    @property
    def _bytes_per_token(self) -> int:
        _, n_kv_heads, _, head_dim = self.keys[0].shape
        return 2 * len(self.keys) * n_kv_heads * head_dim * self.keys[0].element_size()

    def _check_ram(self, n_sequences: int, n_tokens: int) -> None:
        if self.keys[0].device.type == "cpu":
            n_more = n_sequences * n_tokens - self.n_stored * self.capacity
            check_kv_cache_ram([n_tokens] * n_sequences, self._bytes_per_token, n_more=n_more)

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the storage layer by layer, so that only one layer exists twice."""
        for storage in (self.keys, self.values):
            for layer, old in enumerate(storage):
                storage[layer] = change(old)


class PaddedRows(KVCache):
    """Some sequences of a KVCache during one pass: each gets its own number of new tokens.

    The pass pads them at the end. Padding is not stored, and no token attends to it.
    """

    def __init__(self, cache: KVCache, rows: Sequence[int], counts: Sequence[int]) -> None:
        """`counts` are the numbers of new tokens of the sequences `rows`; they fit the context."""
        device = cache.keys[0].device
        start = [cache.lengths[row] for row in rows]
        self._end = max(length + n for length, n in zip(start, counts, strict=True))
        cache.reserve(self._end)
        self.keys, self.values = cache.keys, cache.values
        self._from_empty = not any(start)
        index = torch.tensor(rows, device=device)
        consecutive = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._rows = slice(rows[0], rows[0] + len(rows)) if consecutive else index
        column = torch.arange(max(counts), device=device)
        self._padded = torch.tensor(start, device=device)[:, None] + column  # positions (B, T)
        is_token = column < torch.tensor(counts, device=device)[:, None]  # (B, T)
        self._row, self._column = is_token.nonzero(as_tuple=True)
        self._target = index[self._row], self._padded[is_token]

    def extend(self, n_new: int) -> Tensor:
        """Return the positions (B, T): see `KVCache.extend`."""
        assert n_new == self._padded.shape[1]
        return self._padded

    def mask(self, window: int | None) -> Tensor | None:
        """Return the mask (B, 1, T, S) or None: see `KVCache.mask`."""
        if self._from_empty and (window is None or self._end <= window):
            return None
        return causal_mask(self._padded, self._end, window)[:, None]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, n_kv_heads, T, D); return all keys and values (B, n_kv_heads, S, D)."""
        rows, positions = self._target
        for storage, new in ((self.keys[layer], k), (self.values[layer], v)):
            storage[rows, :, positions] = new[self._row, :, self._column].to(storage.dtype)
        keys, values = self.keys[layer], self.values[layer]
        return keys[self._rows, :, : self._end], values[self._rows, :, : self._end]
