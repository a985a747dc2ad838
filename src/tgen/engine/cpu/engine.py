"""The engine for processors: passes of up to 96 tokens through `forward`."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Literal, overload

import numpy as np

from tgen.config import ModelConfig, StoredAs
from tgen.engine.base import Logits, lengths_after
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.cache import Cache
from tgen.engine.cpu.threads import MAX_LAYERS, threads
from tgen.engine.cpu.weights import Array, Weights, to_float32, whole
from tgen.errors import ModelError
from tgen.model.rope import rotary_tables, sinusoid

_TOGETHER = 96  # tokens in a pass: each reads the weights from afar once
_CHUNK_BYTES = 1 << 18  # of weights, to stay near the processor while a pass's tokens use them
_CHUNKS_A_THREAD = 4  # at least: threads are never equally fast


class CpuEngine:
    """See `engine.base.Engine`. Logits do not depend on other rows, nor on the threads."""

    name = "kernels"

    def __init__(
        self,
        config: ModelConfig,
        arrays: MutableMapping[str, Array],
        *,
        n_threads: int,
        stored: StoredAs = "float32",
    ) -> None:
        """Takes the arrays out of `arrays` one by one: what is held otherwise is not held twice."""
        if config.n_layers > MAX_LAYERS:
            raise ModelError(
                f"the model has {config.n_layers} layers", f"the kernels take {MAX_LAYERS}"
            )
        self.config = config
        self._weights = Weights(config, arrays, stored)
        self.stored: StoredAs = stored
        self._cache = Cache(config)
        self._n_threads = n_threads
        self._job = np.zeros(job_layout.JOB_SIZE, np.int64)
        self._tokens = np.zeros((_TOGETHER, job_layout.TOKEN_COLUMNS), np.int64)
        self._buffers: dict[int, Array] = {job_layout.TOKENS_AT: self._tokens}
        self._n_angles = 0
        self._make_buffers()
        self._set(self._weights.facts() | {job_layout.N_THREADS: n_threads})

    @property
    def context_length(self) -> int:
        """Tokens that a row can hold."""
        return self.config.context_length

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""
        return list(self._cache.lengths)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return self._cache.bytes_held

    @overload
    def extend(
        self, tokens: Sequence[Sequence[int]], *, every_position: Literal[False] = False
    ) -> Logits: ...
    @overload
    def extend(
        self, tokens: Sequence[Sequence[int]], *, every_position: Literal[True]
    ) -> list[Logits]: ...
    def extend(
        self, tokens: Sequence[Sequence[int]], *, every_position: bool = False
    ) -> Logits | list[Logits]:
        """Appends tokens to each row; logits (B, V) of what follows, or a list of (t_i, V)."""
        counts = [len(row) for row in tokens]
        before = self.lengths
        after = lengths_after(before, counts, self.context_length)
        self._cache.make_room(max(after))
        self._set(self._cache.facts())
        self._reach(self._cache.capacity)
        all_ids = np.concatenate([np.asarray(row, np.int64) for row in tokens])
        if all_ids.min() < 0 or all_ids.max() >= self.config.vocab_size:
            raise IndexError(f"a token is outside the vocabulary of {self.config.vocab_size}")
        places = np.zeros((len(all_ids), job_layout.TOKEN_COLUMNS), np.int64)
        ends = np.cumsum(counts)
        for row, (start, n, end) in enumerate(zip(before, counts, ends, strict=True)):
            places[end - n : end, job_layout.POSITION] = np.arange(start, start + n)
            places[end - n : end, job_layout.ROW] = row
        places[:, job_layout.SCORED] = every_position
        places[ends - 1, job_layout.SCORED] = 1
        parts = [
            self._pass(all_ids[i : i + _TOGETHER], places[i : i + _TOGETHER])
            for i in range(0, len(all_ids), _TOGETHER)
        ]
        self._cache.lengths = after
        logits = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.split(logits, ends[:-1]) if every_position else logits

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets each row's tail."""
        self._cache.rewind(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps, repeats and reorders rows."""
        self._cache.select(rows)

    def keys_and_values(self) -> tuple[Array, Array]:
        """Those that the first row holds, each (L, n_kv_heads, n, D)."""
        return self._cache.first_row()

    def restore(self, keys: Array, values: Array) -> None:
        """Leaves one row, which holds these."""
        self._cache.restore(keys, values)

    def _pass(self, ids: Array, places: Array) -> Logits:
        """(n,) ids and their places -> (n scored, V)."""
        n, width = len(ids), self.config.d_model
        x = self._buffers[job_layout.X_AT]
        x[:n, :width] = self._weights.embed(ids)
        if self._positions is not None:
            x[:n, :width] += self._positions[places[:, job_layout.POSITION]]
        self._tokens[:n] = places
        n_scored = int(places[:, job_layout.SCORED].sum())
        logits = np.empty((n_scored, self.config.vocab_size), np.float32)
        self._set(
            {
                job_layout.N_TOKENS: n,
                job_layout.N_SCORED: n_scored,
                job_layout.LOGITS_AT: logits.ctypes.data,
            }
        )
        threads().run(self._job, self.config.n_layers, self._n_threads)
        return logits

    def _set(self, facts: Mapping[int, int]) -> None:
        for name, value in facts.items():
            self._job[name] = value

    def _reach(self, n: int) -> None:
        """Has the angles of `n` positions: of a long context most are never needed."""
        if self.config.position == "rotary" and n > self._n_angles:
            self._n_angles = n
            cos, sin = rotary_tables(self.config, n)
            self._buffers |= {job_layout.COS_AT: cos, job_layout.SIN_AT: sin}
            self._set({job_layout.COS_AT: cos.ctypes.data, job_layout.SIN_AT: sin.ctypes.data})

    def _make_buffers(self) -> None:
        config = self.config
        width, feed, head = whole(config.d_model), whole(config.d_ff), whole(config.head_dim)
        sizes = {
            job_layout.X_AT: width,
            job_layout.Y_AT: width,
            job_layout.QKV_AT: (config.n_heads + 2 * config.n_kv_heads) * head,
            job_layout.MIXED_AT: config.n_heads * head,
            job_layout.HIDDEN_AT: feed,
        }
        for name, size in sizes.items():
            self._buffers[name] = np.zeros((_TOGETHER, size), np.float32)
        gate, scores = _TOGETHER * width, _TOGETHER * (width + feed)
        # A page apart, so that no thread writes where another reads.
        local = whole(scores + config.context_length) + 1024
        self._buffers[job_layout.LOCAL_AT] = np.zeros((self._n_threads, local), np.float32)
        self._positions = None
        if config.position == "learned":
            assert self._weights.positions is not None
            self._positions = to_float32(self._weights.positions)
        elif config.position == "sinusoidal":
            self._positions = sinusoid(config.context_length, config.d_model)
        self._set({name: buffer.ctypes.data for name, buffer in self._buffers.items()})
        largest = max(config.d_ff * width, config.d_model * feed, max(sizes.values()) * width)
        facts = {
            job_layout.LOCAL_STEP: 4 * local,
            job_layout.GATE_OFFSET: 4 * gate,
            job_layout.SCORES_OFFSET: 4 * scores,
            job_layout.N_CHUNKS: self._n_chunks(4 * largest),
            job_layout.N_HEAD_CHUNKS: self._n_chunks(4 * config.vocab_size * width),
        }
        self._set(facts)

    def _n_chunks(self, n_bytes: int) -> int:
        return min(
            job_layout.MAX_CHUNKS,
            max(_CHUNKS_A_THREAD * self._n_threads, -(-n_bytes // _CHUNK_BYTES)),
        )
