"""The KV cache in the kernels' layout: one vector instruction multiplies a number of the query
with the keys of 16 positions.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tgen.checkpoint.dtypes import Array
from tgen.config import CacheDtype, ModelConfig
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.job_layout import LANES, allocate_aligned
from tgen.engine.cpu.weights import padded_length
from tgen.machine.memory import check_kv_cache_ram

_MIN_CAPACITY = 64
_HUGE_PAGE = 2 << 20  # bytes; sequences on small pages cost batches 3 to 10% of their speed
_DTYPES = {
    "float32": job_layout.FLOAT32,
    "float16": job_layout.FLOAT16,
    "int8": job_layout.INT8,
}


class _Buffer(NamedTuple):
    """The storage of one sequence: keys (L, n_kv_heads, S / 16, D, 16), values (L, n_kv_heads, S,
    D), and the scales of both (2, L, n_kv_heads, S), empty unless they are int8."""

    keys: Array
    values: Array
    scales: Array
    row: tuple[int, ...]  # of the table of sequences, see `job_layout`

    @property
    def capacity(self) -> int:
        return self.row[job_layout.CAPACITY]


class BlockedKVCache:
    """Keys and values of B sequences, each with its own storage, which grows by a quarter when it
    is full, up to the context length."""

    def __init__(self, config: ModelConfig, dtype: CacheDtype = "float32") -> None:
        self.config, self.dtype = config, np.dtype(dtype)
        self.dtype_code = _DTYPES[dtype]  # see `job_layout`
        self.lengths = [0]
        self._buffers = [self._allocate(0)]

    @property
    def used_bytes(self) -> int:
        """Bytes of the cached tokens' keys and values, without unused capacity."""
        return sum(self.lengths) * self.config.cache_bytes_per_token(self.dtype.name)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fit without reallocation."""
        return max(buffer.capacity for buffer in self._buffers)

    def reserve(self, n_tokens: Sequence[int]) -> None:
        """Make room for these numbers of tokens; sequences that have it keep their storage.

        Raises ModelError if the tokens do not fit the RAM.
        """
        full = [i for i, n in enumerate(n_tokens) if n > self._buffers[i].capacity]
        check_kv_cache_ram([n_tokens[i] for i in full], self._bytes_per_token)
        for i in full:
            self._buffers[i] = self._copy(i, self.lengths[i], n_tokens[i])

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence to its new length, if it is longer."""
        self.lengths = [
            max(0, min(old, new)) for old, new in zip(self.lengths, lengths, strict=True)
        ]

    def select(self, indices: Sequence[int], lengths: Sequence[int] | None = None) -> None:
        """Select, repeat and reorder sequences: new sequence i is old sequence indices[i], or its
        first lengths[i] tokens.

        Only repeated sequences are copied. Raises ModelError if they do not fit the RAM.
        """
        kept = [self.lengths[old] for old in indices]
        if lengths is not None:
            kept = [min(both) for both in zip(kept, lengths, strict=True)]
        first = {old: new for new, old in reversed(list(enumerate(indices)))}
        is_copy = [first[old] != new for new, old in enumerate(indices)]
        copied = [n for n, copies in zip(kept, is_copy, strict=True) if copies]
        check_kv_cache_ram(copied, self._bytes_per_token)
        buffers = [
            self._copy(old, n, n + 1) if copies else self._buffers[old]
            for old, n, copies in zip(indices, kept, is_copy, strict=True)
        ]
        self._buffers, self.lengths = buffers, kept  # one statement, which Ctrl-C cannot split

    def check_room(self, lengths: Sequence[int]) -> None:
        """Raise ModelError unless sequences of these lengths fit the RAM, the present ones among
        them."""
        n_more = sum(lengths) - sum(self.lengths)
        check_kv_cache_ram(lengths, self._bytes_per_token, n_more=n_more)

    def first_sequence(self) -> tuple[Array, Array]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D), float32."""
        n, size, buffer = self.lengths[0], self.config.head_dim, self._buffers[0]
        keys = buffer.keys.swapaxes(3, 4).reshape(buffer.values.shape)
        both = [array[:, :, :n, :size].astype(np.float32) for array in (keys, buffer.values)]
        if buffer.scales.size:
            both = [x * s[:, :, :n, None] for x, s in zip(both, buffer.scales, strict=True)]
        return both[0], both[1]

    def restore(self, keys: Array, values: Array) -> None:
        """Replace everything with one sequence of keys and values (L, n_kv_heads, n, D)."""
        n, size = keys.shape[2:]
        buffer = self._allocate(n)
        if buffer.scales.size:
            (keys, key_scales), (values, value_scales) = map(_quantize, (keys, values))
            buffer.scales[:, :, :, :n] = key_scales, value_scales
        buffer.values[:, :, :n, :size] = values
        padded = np.zeros_like(buffer.values)
        padded[:, :, :n, :size] = keys
        blocks = buffer.keys.swapaxes(3, 4)  # (L, n_kv_heads, S / 16, 16, D)
        blocks[:] = padded.reshape(blocks.shape)
        self._buffers, self.lengths = [buffer], [n]

    def addresses(self) -> Array:
        """Return the table of sequences, see `job_layout`: int64 (B, SEQUENCE_COLUMNS)."""
        return np.array([buffer.row for buffer in self._buffers], np.int64)

    @property
    def _bytes_per_token(self) -> int:
        config = self.config
        n_bytes = padded_length(config.head_dim) * self.dtype.itemsize + self._scale_bytes
        return 2 * config.n_layers * config.n_kv_heads * n_bytes

    @property
    def _scale_bytes(self) -> int:
        """Bytes per position of a head's keys, and of its values."""
        return 4 if self.dtype_code == job_layout.INT8 else 0

    def _copy(self, sequence: int, n_tokens: int, n_needed: int) -> _Buffer:
        """Copy tokens to storage with a quarter more room than is needed."""
        wanted = max(_MIN_CAPACITY, n_needed + n_needed // 4)
        old, new = self._buffers[sequence], self._allocate(min(wanted, self.config.context_length))
        n_blocks = -(-n_tokens // LANES)
        new.keys[:, :, :n_blocks] = old.keys[:, :, :n_blocks]
        new.values[:, :, :n_tokens] = old.values[:, :, :n_tokens]
        new.scales[..., :n_tokens] = old.scales[..., :n_tokens]
        return new

    def _allocate(self, capacity: int) -> _Buffer:
        n_blocks, size = -(-capacity // LANES), padded_length(self.config.head_dim)
        shape = (self.config.n_layers, self.config.n_kv_heads)
        block = 2 * math.prod(shape) * LANES * size * self.dtype.itemsize  # bytes
        alignment = job_layout.CACHE_LINE
        if n_blocks * block >= _HUGE_PAGE:
            alignment = _HUGE_PAGE
            n_blocks = -(-n_blocks * block // _HUGE_PAGE) * _HUGE_PAGE // block  # fill the last one
        both = (2, *shape, n_blocks * LANES * size)
        keys, values = allocate_aligned(both, self.dtype, alignment=alignment)
        keys = keys.reshape(*shape, n_blocks, size, LANES)
        values = values.reshape(*shape, n_blocks * LANES, size)
        n_scales = n_blocks * LANES * self._scale_bytes // 4
        scales = allocate_aligned((2, *shape, n_scales))
        addresses = [array.ctypes.data for array in (keys, values, *scales)]
        addresses.insert(job_layout.CAPACITY, n_blocks * LANES)
        return _Buffer(keys, values, scales, tuple(addresses))


def _quantize(vectors: Array) -> tuple[Array, Array]:
    """Return vectors (..., D) in int8, and their scales; `attention_tiles.find_scale` makes sure
    that those of an int8 cache are the same again."""
    scales = np.abs(vectors).max(axis=-1, initial=0).astype(np.float32) / np.float32(127)
    inverse = 1 / np.where(scales == 0, np.float32(np.inf), scales)
    with np.errstate(invalid="ignore"):  # NaN stays in the scale
        return np.rint(vectors * inverse[..., None]).astype(np.int8), scales
