"""Passes of one model: its weights and the buffers of a pass, shared by all of its engines."""

import threading
from collections.abc import MutableMapping

import numpy as np

from tgen.checkpoint.dtypes import Array, to_float32
from tgen.config import ModelConfig, StoredAs
from tgen.engine.base import Logits
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.kv_cache import BlockedKVCache
from tgen.engine.cpu.thread_pool import MAX_LAYERS, thread_pool
from tgen.engine.cpu.weights import PackedWeights, padded_length
from tgen.errors import ModelError
from tgen.model.rope import rotary_tables, sinusoid

MAX_TOKENS = 96  # per pass, which reads all weights from RAM once
MAX_HEADS = job_layout.MAX_CHUNKS // MAX_TOKENS  # attention has a chunk per token and head
_CHUNK_BYTES = 1 << 18  # bytes of weights: they stay in the CPU cache while all tokens use them
_MIN_CHUNKS_PER_THREAD = 4  # to balance threads of different speed


class PassRunner:
    """Runs one pass at a time; threads that call `run` meanwhile wait."""

    def __init__(
        self,
        config: ModelConfig,
        arrays: MutableMapping[str, Array],
        *,
        n_threads: int,
        dtype: StoredAs,
    ) -> None:
        """Move the arrays out of `arrays` one by one, so that no converted array exists twice.

        Raises ModelError for a model with more layers or heads than a pass can have.
        """
        _check_limit("layers", config.n_layers, MAX_LAYERS)
        _check_limit("attention heads", config.n_heads, MAX_HEADS)
        self.config = config
        self._weights = PackedWeights(config, arrays, dtype)
        self._lock = threading.Lock()
        self._n_threads = n_threads
        self._job = np.zeros(job_layout.JOB_SIZE, np.int64)
        self._tokens = np.zeros((MAX_TOKENS, job_layout.TOKEN_COLUMNS), np.int64)
        self._buffers: dict[int, Array] = {job_layout.TOKENS_PTR: self._tokens}
        self._n_positions = 0  # positions that tables and attention scores have room for
        self._positions: Array | None = None  # (n, C), added to the embeddings
        self._allocate_buffers()
        self._set_fields(self._weights.job_fields() | {job_layout.N_THREADS: n_threads})

    def run(self, cache: BlockedKVCache, ids: Array, rows: Array) -> Logits:
        """Token ids (n,) and their job rows (n, TOKEN_COLUMNS) -> logits where needed.

        Writes keys and values to `cache`, which has room for them.
        """
        n, width = len(ids), self.config.d_model
        n_logits = int(rows[:, job_layout.NEEDS_LOGITS].sum())
        logits = np.empty((n_logits, self.config.vocab_size), np.float32)
        fields = {job_layout.N_TOKENS: n, job_layout.N_LOGITS: n_logits}
        fields[job_layout.LOGITS_PTR] = logits.ctypes.data
        with self._lock:
            self._reserve_positions(cache.capacity)
            x = self._buffers[job_layout.X_PTR]
            x[:n, :width] = self._weights.embed(ids)
            if self.config.embedding_scale != 1:
                x[:n, :width] *= np.float32(self.config.embedding_scale)
            if self._positions is not None:
                x[:n, :width] += self._positions[rows[:, job_layout.POSITION]]
            self._tokens[:n] = rows
            self._set_fields(cache.job_fields() | fields)
            thread_pool().run(self._job, self.config.n_layers, self._n_threads)
        return logits

    def _set_fields(self, fields: dict[int, int]) -> None:
        for name, value in fields.items():
            self._job[name] = value

    def _reserve_positions(self, n: int) -> None:
        """Make room for `n` positions: most of a long context is never used."""
        if n <= self._n_positions:
            return
        config = self.config
        before_scores = MAX_TOKENS * (padded_length(config.d_model) + padded_length(config.d_ff))
        # A page apart, so that threads do not share cache lines.
        scratch = padded_length(before_scores + n) + 1024
        new = {job_layout.SCRATCH_PTR: np.zeros((self._n_threads, scratch), np.float32)}
        if config.position == "rotary":
            new[job_layout.COS_PTR], new[job_layout.SIN_PTR] = rotary_tables(config, n)
            if config.local_rope_theta is not None:
                cos, sin = rotary_tables(config, n, "local")
                new[job_layout.LOCAL_COS_PTR], new[job_layout.LOCAL_SIN_PTR] = cos, sin
        elif config.position == "sinusoidal":
            self._positions = sinusoid(n, config.d_model)
        self._set_fields({name: array.ctypes.data for name, array in new.items()})
        self._set_fields({job_layout.SCRATCH_BYTES: 4 * scratch})
        self._buffers |= new
        self._n_positions = n

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
            self._buffers[name] = np.zeros((MAX_TOKENS, size), np.float32)
        gate, scores = MAX_TOKENS * width, MAX_TOKENS * (width + hidden)
        if config.position == "learned":
            assert self._weights.positions is not None
            self._positions = to_float32(self._weights.positions)
        self._set_fields({name: buffer.ctypes.data for name, buffer in self._buffers.items()})
        largest = max(config.d_ff * width, config.d_model * hidden, max(sizes.values()) * width)
        self._set_fields(
            {
                job_layout.GATE_OFFSET: 4 * gate,
                job_layout.SCORES_OFFSET: 4 * scores,
                job_layout.N_CHUNKS: self._n_chunks(4 * largest),
                job_layout.N_LM_HEAD_CHUNKS: self._n_chunks(4 * config.vocab_size * width),
            }
        )

    def _n_chunks(self, n_bytes: int) -> int:
        wanted = max(_MIN_CHUNKS_PER_THREAD * self._n_threads, -(-n_bytes // _CHUNK_BYTES))
        return min(job_layout.MAX_CHUNKS, wanted)


def _check_limit(what: str, n: int, limit: int) -> None:
    if n > limit:
        message = f"the model has {n:,} {what} (limit of the compiled kernels: {limit:,})"
        raise ModelError(message, "check config.json: known models have fewer")
