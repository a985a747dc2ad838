"""The CPU engine: passes of up to 96 tokens through the compiled `forward`."""

from collections.abc import MutableMapping, Sequence

import numpy as np

from tgen.checkpoint.dtypes import Array, to_float32
from tgen.config import ModelConfig, StoredAs
from tgen.engine.base import Logits, extended_lengths
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.kv_cache import BlockedKVCache
from tgen.engine.cpu.thread_pool import MAX_LAYERS, thread_pool
from tgen.engine.cpu.weights import PackedWeights, padded_length
from tgen.errors import ModelError
from tgen.model.rope import rotary_tables, sinusoid

_MAX_TOKENS = 96  # per pass, which reads all weights from RAM once
_CHUNK_BYTES = 1 << 18  # bytes of weights: they stay in the CPU cache while all tokens use them
_MIN_CHUNKS_PER_THREAD = 4  # to balance threads of different speed


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
        """Move the arrays out of `arrays` one by one, so that no converted array exists twice."""
        if config.n_layers > MAX_LAYERS:
            raise ModelError(
                f"the model has {config.n_layers} layers (limit {MAX_LAYERS})", "use --engine torch"
            )
        self.config, self.context_length = config, config.context_length
        self._weights = PackedWeights(config, arrays, dtype)
        self.dtype: StoredAs = dtype
        self._cache = BlockedKVCache(config)
        self._n_threads = n_threads
        self._job = np.zeros(job_layout.JOB_SIZE, np.int64)
        self._tokens = np.zeros((_MAX_TOKENS, job_layout.TOKEN_COLUMNS), np.int64)
        self._buffers: dict[int, Array] = {job_layout.TOKENS_PTR: self._tokens}
        self._n_rotary = 0  # positions in the tables of cosines and sines
        self._allocate_buffers()
        self._set_fields(self._weights.job_fields() | {job_layout.N_THREADS: n_threads})

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
        counts = [len(new) for new in tokens]
        before = self.lengths
        after = extended_lengths(before, counts, self.context_length)
        self._cache.reserve(max(after))
        self._set_fields(self._cache.job_fields())
        self._extend_rotary_tables(self._cache.capacity)
        ids = np.concatenate([np.asarray(new, np.int64) for new in tokens])
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise IndexError(f"a token is outside the vocabulary of {self.config.vocab_size}")
        rows = np.zeros((len(ids), job_layout.TOKEN_COLUMNS), np.int64)
        ends = np.cumsum(counts)
        for i, (start, n, end) in enumerate(zip(before, counts, ends, strict=True)):
            rows[end - n : end, job_layout.POSITION] = np.arange(start, start + n)
            rows[end - n : end, job_layout.SEQUENCE] = i
        rows[:, job_layout.NEEDS_LOGITS] = every_position
        rows[ends - 1, job_layout.NEEDS_LOGITS] = 1
        parts = [
            self._run_pass(ids[i : i + _MAX_TOKENS], rows[i : i + _MAX_TOKENS])
            for i in range(0, len(ids), _MAX_TOKENS)
        ]
        self._cache.lengths = after
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence."""
        self._cache.rewind(lengths)

    def select(self, indices: Sequence[int]) -> None:
        """Select, repeat and reorder sequences."""
        self._cache.select(indices)

    def keys_and_values(self) -> tuple[Array, Array]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D)."""
        return self._cache.first_sequence()

    def restore(self, keys: Array, values: Array) -> None:
        """Replace everything with one sequence that has these keys and values."""
        self._cache.restore(keys, values)

    def _run_pass(self, ids: Array, rows: Array) -> Logits:
        """Token ids (n,) and their job rows (n, TOKEN_COLUMNS) -> logits where needed."""
        n, width = len(ids), self.config.d_model
        x = self._buffers[job_layout.X_PTR]
        x[:n, :width] = self._weights.embed(ids)
        if self._positions is not None:
            x[:n, :width] += self._positions[rows[:, job_layout.POSITION]]
        self._tokens[:n] = rows
        n_logits = int(rows[:, job_layout.NEEDS_LOGITS].sum())
        logits = np.empty((n_logits, self.config.vocab_size), np.float32)
        fields = {job_layout.N_TOKENS: n, job_layout.N_LOGITS: n_logits}
        self._set_fields(fields | {job_layout.LOGITS_PTR: logits.ctypes.data})
        thread_pool().run(self._job, self.config.n_layers, self._n_threads)
        return logits

    def _set_fields(self, fields: dict[int, int]) -> None:
        for name, value in fields.items():
            self._job[name] = value

    def _extend_rotary_tables(self, n: int) -> None:
        """Compute the tables for `n` positions: most of a long context is never used."""
        if self.config.position == "rotary" and n > self._n_rotary:
            self._n_rotary = n
            cos, sin = rotary_tables(self.config, n)
            self._buffers |= {job_layout.COS_PTR: cos, job_layout.SIN_PTR: sin}
            fields = {job_layout.COS_PTR: cos.ctypes.data, job_layout.SIN_PTR: sin.ctypes.data}
            self._set_fields(fields)

    def _allocate_buffers(self) -> None:
        config = self.config
        width, hidden = padded_length(config.d_model), padded_length(config.d_ff)
        head = padded_length(config.head_dim)
        sizes = {
            job_layout.X_PTR: width,
            job_layout.Y_PTR: width,
            job_layout.QKV_PTR: (config.n_heads + 2 * config.n_kv_heads) * head,
            job_layout.ATTENTION_PTR: config.n_heads * head,
            job_layout.HIDDEN_PTR: hidden,
        }
        for name, size in sizes.items():
            self._buffers[name] = np.zeros((_MAX_TOKENS, size), np.float32)
        gate, scores = _MAX_TOKENS * width, _MAX_TOKENS * (width + hidden)
        # A page apart, so that threads do not share cache lines.
        scratch = padded_length(scores + config.context_length) + 1024
        self._buffers[job_layout.SCRATCH_PTR] = np.zeros((self._n_threads, scratch), np.float32)
        self._positions = None
        if config.position == "learned":
            assert self._weights.positions is not None
            self._positions = to_float32(self._weights.positions)
        elif config.position == "sinusoidal":
            self._positions = sinusoid(config.context_length, config.d_model)
        self._set_fields({name: buffer.ctypes.data for name, buffer in self._buffers.items()})
        largest = max(config.d_ff * width, config.d_model * hidden, max(sizes.values()) * width)
        self._set_fields(
            {
                job_layout.SCRATCH_BYTES: 4 * scratch,
                job_layout.GATE_OFFSET: 4 * gate,
                job_layout.SCORES_OFFSET: 4 * scores,
                job_layout.N_CHUNKS: self._n_chunks(4 * largest),
                job_layout.N_LM_HEAD_CHUNKS: self._n_chunks(4 * config.vocab_size * width),
            }
        )

    def _n_chunks(self, n_bytes: int) -> int:
        wanted = max(_MIN_CHUNKS_PER_THREAD * self._n_threads, -(-n_bytes // _CHUNK_BYTES))
        return min(job_layout.MAX_CHUNKS, wanted)
