"""Tokens -> the batches of a run, a pure function of seed and step.

Documents lie one after another in one array and windows are cut from it anywhere; it may be longer
than the memory. A batch says beside its tokens which document each lies in, and which of them the
loss counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.bpe_dropout import split_tokens
from tgen.storage.disk_array import Array, blocks

_SPLIT = 1  # what these random numbers are for: dropout's have the same seed and step


class Batch(NamedTuple):
    """Windows of T + 1 tokens: T inputs and, shifted by one, T targets."""

    tokens: NDArray[np.int64]  # (B, T + 1)
    scored: NDArray[np.bool_] | None  # (B, T): the targets that count; None: all of them
    documents: NDArray[np.int32] | None  # (B, T): each input's, from 0 in a row; None: one a row


@dataclass(frozen=True)
class TokenDataset:
    """The tokens of a run and the order they are seen in, a pure function of seed and step."""

    train: Array  # (n,) uint16 or uint32
    held_out: Array  # (m,); empty: nothing is held out
    held_out_bytes: int  # of the text whose tokens are scored
    context_length: int
    batch_size: int
    seed: int
    end_of_text: int | None = None  # the token between documents; None: they are not told apart
    train_scored: Array | None = None  # (n,) bool; None: every token
    held_out_scored: Array | None = None  # (m,)
    merge_pairs: NDArray[np.int64] | None = None  # (V, 2), see `split_tokens`

    @property
    def train_tokens(self) -> int:
        """Tokens to train on that are scored."""
        return _n_scored(self.train, self.train_scored)

    @property
    def held_out_tokens(self) -> int:
        """Held-out tokens that are scored."""
        return _n_scored(self.held_out, self.held_out_scored)

    def batch(self, step: int, *, token_split: float = 0.0, rows: range | None = None) -> Batch:
        """Step `step`'s windows, `batch_size` of `context_length` + 1 tokens, or some `rows` of it.

        Every epoch cuts the text into windows at a new offset and deals them in a new order, so
        each token is seen once an epoch. With `token_split` each is taken apart with that
        probability; what then finds no room at a window's end is not seen in this epoch.
        """
        length = self.context_length
        per_epoch = max(1, (len(self.train) - 1) // length)
        wanted = range(self.batch_size) if rows is None else rows
        starts = []
        # What is taken apart hangs on the rows before.
        for row in range(self.batch_size) if token_split > 0 else wanted:
            epoch, i = divmod(step * self.batch_size + row, per_epoch)
            offset, order = _epoch(self.seed, epoch, per_epoch, len(self.train) - length)
            starts.append((offset + order[i] * length) % (len(self.train) - length))
        tokens = _cut(self.train, starts, length + 1).astype(np.int64)
        scored = self.train_scored
        counts = None if scored is None else _cut(scored, starts, length + 1)
        if token_split > 0:
            assert self.merge_pairs is not None
            random = np.random.default_rng([self.seed, step, _SPLIT])
            tokens, positions = split_tokens(
                tokens, self.merge_pairs, probability=token_split, random=random
            )
            counts = None if counts is None else np.take_along_axis(counts, positions, axis=1)
            part = slice(wanted.start, wanted.stop)
            tokens, counts = tokens[part], None if counts is None else counts[part]
        return self._batch(tokens, counts)

    def held_out_windows(self, max_tokens: int) -> Iterator[Batch]:
        """Windows of up to context_length + 1 tokens that predict each held-out token exactly once.

        They do not overlap but for the first token of each, which is the last of the one before
        (of the training text for the first). Those in which nothing is scored are left out; more
        than `max_tokens` are thinned out evenly.
        """
        length = self.context_length
        stream = np.concatenate([self.train[-1:], self.held_out[:]])
        scored = self.held_out_scored
        if scored is not None:
            scored = np.concatenate([[False], scored[:]])  # the first is no target
        starts = _starts(len(stream), scored, length)
        rest = len(self.held_out) % length
        n_tokens = len(starts) * length + rest
        yield from self._groups(stream, scored, starts[:: max(1, -(-n_tokens // max_tokens))])
        if rest > 0 and n_tokens <= max_tokens:
            yield self._windows(stream, scored, [len(self.held_out) - rest], rest)

    def train_windows(self, max_tokens: int) -> Iterator[Batch]:
        """About `max_tokens` of the training text, in windows spread evenly over it."""
        length = self.context_length
        starts = _starts(len(self.train), self.train_scored, length)
        every = max(1, -(-len(starts) * length // max_tokens))
        yield from self._groups(self.train, self.train_scored, starts[::every])

    def _groups(
        self, stream: Array, scored: Array | None, starts: NDArray[np.int64]
    ) -> Iterator[Batch]:
        per_batch = max(1, 8192 // self.context_length)
        for i in range(0, len(starts), per_batch):
            yield self._windows(stream, scored, starts[i : i + per_batch], self.context_length)

    def _windows(
        self,
        stream: Array,
        scored: Array | None,
        starts: Sequence[int] | NDArray[np.int64],
        length: int,
    ) -> Batch:
        tokens = _cut(stream, starts, length + 1).astype(np.int64)
        return self._batch(tokens, None if scored is None else _cut(scored, starts, length + 1))

    def _batch(self, tokens: NDArray[np.int64], counts: NDArray[np.bool_] | None) -> Batch:
        scored = None if counts is None else np.ascontiguousarray(counts[:, 1:])
        return Batch(tokens, scored, self._documents(tokens[:, :-1]))

    def _documents(self, tokens: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """(B, T) -> the number of each token's document, or None where no row holds a border."""
        begins = tokens == (-1 if self.end_of_text is None else self.end_of_text)
        begins[:, 0] = False
        if not begins.any():
            return None
        # An end-of-text token never sees the document it ends: from it alone the next is predicted,
        # as from an empty prompt, after which it stays in sight. A prompt that is given has none
        # before it. So that neither is a surprise, every other token is hidden from what follows.
        rows = np.arange(len(tokens))[:, None]
        hidden = begins & ((begins.cumsum(axis=1) + rows) % 2 == 1)
        begins[:, 1:] |= hidden[:, :-1]
        documents: NDArray[np.int32] = begins.cumsum(axis=1, dtype=np.int32)
        return documents


def _cut(array: Array, starts: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[Any]:
    """(B, length): what follows each of the starts."""
    return np.stack([array[start : start + length] for start in map(int, starts)])


def _n_scored(tokens: Array, scored: Array | None) -> int:
    return len(tokens) if scored is None else sum(int(block.sum()) for block in blocks(scored))


def _starts(n_tokens: int, scored: Array | None, length: int) -> NDArray[np.int64]:
    """Where windows begin that lie side by side, without those in which nothing is scored."""
    starts = np.arange((n_tokens - 1) // length) * length
    if scored is None:
        return starts
    together = max(1, (1 << 22) // length)  # windows
    counted = [
        scored[first + 1 : first + together * length + 1][: (len(starts) * length - first)]
        .reshape(-1, length)
        .any(axis=1)
        for first in range(0, len(starts) * length, together * length)
    ]
    found: NDArray[np.int64] = starts[np.concatenate([np.zeros(0, bool), *counted])]
    return found


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def _epoch(seed: int, epoch: int, n_windows: int, n_starts: int) -> tuple[int, NDArray[np.int64]]:
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return int(random.integers(n_starts)), random.permutation(n_windows)
