"""The CPU engine: passes of up to `MAX_TOKENS` tokens through the compiled `forward`.

The engines of one model share its weights and the buffers of a pass. Passes of many tokens use AMX
where `amx_permission` allows it.
"""

import threading
import time
from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np

from tgen.checkpoint.dtypes import Array
from tgen.config import CacheDtype, SamplingConfig, StoredAs
from tgen.engine.base import CachingEngine, Logits, extended_lengths
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.amx_permission import may_use_amx
from tgen.engine.cpu.job_layout import (
    CHUNKS_PER_THREAD,
    KEYS_PER_RANGE,
    LANES,
    PANEL,
    QUERIES,
    TILE_BYTES,
    allocate_aligned,
)
from tgen.engine.cpu.kernel_cache import forward_address, load_kernels
from tgen.engine.cpu.kv_cache import BlockedKVCache
from tgen.engine.cpu.row_sampler import RowSampler, row_sampler
from tgen.engine.cpu.thread_pool import MAX_LAYERS, thread_pool
from tgen.engine.cpu.weights import PackedWeights, padded_length
from tgen.errors import ModelError
from tgen.model.rope import rotary_tables, sinusoid

MAX_TOKENS = 288  # per pass, which reads all weights from RAM once; a multiple of tiles' 12 and 16
MAX_HEADS = job_layout.MAX_CHUNKS // MAX_TOKENS  # merging attention has a chunk per token and head
# A pass with fewer tokens is faster without AMX.
_MIN_TILE_TOKENS = {job_layout.BFLOAT16: 4, job_layout.INT8: 24}
_CHUNKS_PER_THREAD = 8  # of attention; with fewer, threads share the keys of a head
_MAX_PARTIALS = 1 << 24  # numbers of attention that is not merged yet
_CONTINUE_SECONDS = 0.001  # without Python; Ctrl-C and other requests wait this long


class CpuEngine(CachingEngine):
    """See `engine.base.Engine`. Logits do not depend on other sequences or the threads."""

    name = "kernels"
    _cache: BlockedKVCache

    def __init__(
        self, weights: PackedWeights, *, n_threads: int, cache_dtype: CacheDtype | None = None
    ) -> None:
        """Keys and values are stored in float32 by default, or in float16 if the weights are
        smaller. Raises ModelError: see `PassRunner`."""
        self.config = config = weights.config
        self.context_length, self.vocab_size = config.context_length, config.vocab_size
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

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are not another engine's."""
        return self.weights.n_bytes

    def share_weights(self, other: Self) -> None:
        """Use another engine's memory for equal weights; see `engine.base.Engine`."""
        self.weights.share(other.weights)

    def clone(self) -> Self:
        """Return an engine with the same weights and one empty sequence."""
        other = copy(self)
        other._lock = threading.Lock()
        other._cache = BlockedKVCache(self.config, self.cache_dtype)
        return other

    def extend(self, tokens: Sequence[Sequence[int]], *, every_position: bool = False) -> Logits:
        """Append tokens to each sequence; see `engine.base.Engine.extend`."""
        with self._lock:
            before, counts = self.lengths, [len(new) for new in tokens]
            after = extended_lengths(before, counts, self.context_length)
            rows: list[tuple[int, ...]] = []  # see `job_layout`
            for i, new in enumerate(tokens):
                self._check_tokens(new)
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

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise IndexError(f"a token is outside the vocabulary of {self.config.vocab_size}")

    def continue_text(
        self, token: int, n: int, sampling: SamplingConfig, *, position: int
    ) -> list[int]:
        """Append tokens and sample the following ones; see `engine.base.Engine.continue_text`."""
        sampler = row_sampler()
        if sampler is None or not sampler.accepts(sampling):
            return []
        self._check_tokens([token])
        with self._lock:
            before, *others = self._cache.lengths
            if others:
                return []
            n = min(n, KEYS_PER_RANGE - before % KEYS_PER_RANGE)  # a job's number of ranges
            self._cache.reserve(extended_lengths([before], [n], self.context_length))
            row = token, before, 0, True
            sampled = self._runner.continue_text(
                self._cache, row, sampler, sampling.seed, position, n
            )
            self._cache.lengths = [before + len(sampled)]
            return sampled

    def select(self, indices: Sequence[int], lengths: Sequence[int] | None = None) -> None:
        """Select, repeat and reorder sequences."""
        with self._lock:
            self._cache.select(indices, lengths)

    def keys_and_values(self) -> tuple[Array, Array]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D)."""
        with self._lock:
            return self._cache.first_sequence()

    def restore(self, keys: Array, values: Array) -> None:
        """Replace everything with one sequence that has these keys and values."""
        with self._lock:
            self._cache.restore(keys, values)


class PassRunner:
    """Runs one pass at a time; threads that call `run` meanwhile wait."""

    def __init__(self, weights: PackedWeights, *, n_threads: int) -> None:
        """Raises ModelError for a model with more layers or heads than a pass can have."""
        config = weights.config
        _check_limit("layers", config.n_layers, MAX_LAYERS)
        _check_limit("attention heads", config.n_heads, MAX_HEADS)
        self.config, self.weights = config, weights
        self._lock = threading.Lock()
        self._n_threads = n_threads
        self._job = np.zeros(job_layout.JOB_SIZE, np.int64)
        self._tokens = np.zeros((MAX_TOKENS, job_layout.TOKEN_COLUMNS), np.int64)
        self._spans = np.zeros((MAX_TOKENS, job_layout.SPAN_COLUMNS), np.int64)
        self._buffers: dict[int, Array] = {
            job_layout.TOKENS_PTR: self._tokens,
            job_layout.SPANS_PTR: self._spans,
        }
        self._partials = allocate_aligned((0,))  # of attention, if threads share its keys
        self._seconds = _CONTINUE_SECONDS  # of a token when it last continued a text
        self._n_positions = 0  # positions that tables and attention scores have room for
        self._allocate_buffers()
        self._set_fields(self.weights.job_fields() | {job_layout.N_THREADS: n_threads})

    def run(self, cache: BlockedKVCache, rows: Sequence[tuple[int, ...]]) -> Logits:
        """Run a pass of tokens with these rows, see `job_layout`; return logits where needed.

        Writes keys and values to `cache`, which has room for them.
        """
        with self._lock:
            logits = self._set_up(cache, rows)
            thread_pool().run(self._job, self.config.n_layers, self._n_threads)
        return logits

    def continue_text(
        self,
        cache: BlockedKVCache,
        row: tuple[int, ...],
        sampler: RowSampler,
        seed: int,
        position: int,
        n: int,
    ) -> list[int]:
        """Run passes of one token each, from that of `row` on; return the sampled tokens, up to `n`
        and as many as take about a millisecond."""
        with self._lock:
            n = max(1, min(n, int(_CONTINUE_SECONDS / self._seconds), MAX_TOKENS - 1))
            logits, started_at = self._set_up(cache, [row]), time.perf_counter()
            request = sampler.prepare(logits, seed, position)
            n = thread_pool().run(
                self._job, self.config.n_layers, self._n_threads, request=request, n_tokens=n
            )
            self._seconds = (time.perf_counter() - started_at) / max(1, n)
            return [int(token) for token in self._tokens[1 : n + 1, job_layout.TOKEN_ID]]

    def _set_up(self, cache: BlockedKVCache, rows: Sequence[tuple[int, ...]]) -> Logits:
        """Fill in the job of a pass; return where it writes logits."""
        n = len(rows)
        rows = sorted(rows, key=lambda row: -row[job_layout.NEEDS_LOGITS])
        n_logits = sum(row[job_layout.NEEDS_LOGITS] for row in rows)
        logits = np.empty((n_logits, -(-self.config.vocab_size // PANEL) * PANEL), np.float32)
        fields = {job_layout.N_TOKENS: n, job_layout.N_LOGITS: n_logits}
        fields[job_layout.LOGITS_PTR] = logits.ctypes.data
        fields[job_layout.INPUT_DTYPE] = self._input_dtype(n)
        fields[job_layout.FORWARD_PTR] = forward_address(
            (self.weights.input_dtype, cache.dtype_code)
        )
        self._reserve_positions(cache.capacity)
        self._tokens[:n] = rows
        spans = _find_spans(rows)
        self._spans[: len(spans)] = spans
        fields[job_layout.N_SPANS] = len(spans)
        fields |= self._split_keys(rows, len(spans) * self.config.n_kv_heads)
        fields[job_layout.N_LOGITS_SPANS] = sum(first < n_logits for first, _ in spans)
        self._sequences = cache.addresses()  # alive as long as the job has its address
        fields[job_layout.SEQUENCES_PTR] = self._sequences.ctypes.data
        self._set_fields(fields)
        return logits[:, : self.config.vocab_size]

    def _input_dtype(self, n_tokens: int) -> int:
        dtype = self.weights.input_dtype
        if dtype == job_layout.FLOAT32 or n_tokens < _MIN_TILE_TOKENS[dtype] or not may_use_amx():
            return dtype
        is_int8 = dtype == job_layout.INT8
        return job_layout.INT8_TILES if is_int8 else job_layout.BFLOAT16_TILES

    def _set_fields(self, fields: dict[int, int]) -> None:
        for name, value in fields.items():
            self._job[name] = value

    def _split_keys(self, rows: Sequence[tuple[int, ...]], n_chunks: int) -> dict[int, int]:
        """Return the fields of a pass that say how attention is divided, besides `n_chunks`."""
        n_ranges = max(row[job_layout.POSITION] for row in rows) // KEYS_PER_RANGE + 1
        size = padded_length(self.config.head_dim) + LANES
        n = len(rows) * self.config.n_heads * n_ranges * size
        splits = (
            self._n_threads > 1
            and n_chunks < _CHUNKS_PER_THREAD * self._n_threads
            and n_chunks * n_ranges <= job_layout.MAX_CHUNKS
            and n <= _MAX_PARTIALS
        )
        if splits and n > self._partials.size:
            self._partials = allocate_aligned((min(2 * n, _MAX_PARTIALS),))
        return {
            job_layout.N_RANGES: n_ranges,
            job_layout.N_PARTS: n_ranges if splits else 1,
            job_layout.PARTIALS_PTR: self._partials.ctypes.data,
        }

    def _reserve_positions(self, n: int) -> None:
        """Make room for `n` positions: most of a long context is never used."""
        if n <= self._n_positions:
            return
        config = self.config
        row, n_ranges = padded_length(config.head_dim) + LANES, -(-n // KEYS_PER_RANGE)
        n_scores = QUERIES * (8 + row * (1 + n_ranges) + KEYS_PER_RANGE)  # see `_attend_together`
        n_tiles = TILE_BYTES + self._widest_input * PANEL // 4  # see `products_of_tiles`
        scratch = padded_length(self._before_spare() + max(n_scores, n_tiles))
        scratch += 1024  # a page apart, so that threads do not share cache lines
        new = {job_layout.SCRATCH_PTR: allocate_aligned((self._n_threads, scratch))}
        if config.position == "rotary":
            new[job_layout.COS_PTR], new[job_layout.SIN_PTR] = rotary_tables(config, n)
            if config.local_rope_theta is not None:
                cos, sin = rotary_tables(config, n, "local")
                new[job_layout.LOCAL_COS_PTR], new[job_layout.LOCAL_SIN_PTR] = cos, sin
        elif config.position == "sinusoidal":
            self.weights.set_positions(sinusoid(n, config.d_model))
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
            job_layout.INPUTS_PTR: width,
            job_layout.ATTENTION_INPUTS_PTR: config.n_heads * head,
            job_layout.HIDDEN_INPUTS_PTR: hidden,
        }
        for name, size in sizes.items():  # rounded inputs take less than float32
            self._buffers[name] = allocate_aligned((MAX_TOKENS, size))
        self._widest_input = max(width, config.n_heads * head, hidden)
        self._set_fields({name: buffer.ctypes.data for name, buffer in self._buffers.items()})
        offsets = {
            job_layout.INPUTS_OFFSET: width,
            job_layout.HIDDEN_OFFSET: (1 + MAX_TOKENS) * width,
            job_layout.SPARE_OFFSET: self._before_spare(),
        }
        self._set_fields({name: 4 * numbers for name, numbers in offsets.items()})

    def _before_spare(self) -> int:
        """Numbers of a thread's scratch memory before what attention uses: one vector, the inputs
        of products, and a chunk of the hidden vectors with their gates."""
        width = padded_length(self.config.d_model)
        n_chunks = CHUNKS_PER_THREAD * self._n_threads
        chunk = padded_length(-(-self.config.d_ff // n_chunks))
        return width + MAX_TOKENS * (width + 2 * chunk)


def _find_spans(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Return spans of up to QUERIES tokens of one sequence: the first token and their number. The
    logits of all of them are needed, or of none."""
    spans: list[tuple[int, int]] = []
    previous = None
    for i, row in enumerate(rows):
        kind = row[job_layout.SEQUENCE], row[job_layout.NEEDS_LOGITS]
        if kind == previous and spans[-1][1] < QUERIES:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((i, 1))
        previous = kind
    return spans


def _check_limit(what: str, n: int, limit: int) -> None:
    if n > limit:
        message = f"the model has {n:,} {what} (limit of the compiled kernels: {limit:,})"
        raise ModelError(message, "check config.json: known models have fewer")
