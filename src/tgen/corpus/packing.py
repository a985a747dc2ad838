"""Rows packed whole into windows, as batches that are a pure function of seed and step.

A row is one example: its tokens, and which of them are in the loss. Windows are filled by best-fit
decreasing bin packing (Johnson 1973): rows in order of decreasing length, each in the window with
the least room that it fits into. Each row is a document of its own, so its positions count from 0
and it attends to no other row. Which window has which lengths is the same in every epoch; which of
the rows of equal length it has, and the order of the windows, are shuffled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.dataset import EVAL_BATCH_TOKENS, Batch, Tokens
from tgen.storage.disk_array import Array, blocks

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class PackedRows:
    """The rows to train on and the held-out rows, concatenated, and the order of training.

    Both have a loss mask and the tokens per row, at most `context_length` + 1.
    """

    train: Tokens
    val: Tokens  # empty without held-out rows
    val_bytes: int  # bytes of the text whose tokens are in the loss
    context_length: int
    batch_size: int
    seed: int
    _epochs: dict[int, tuple[Indices, Indices]] = field(default_factory=dict, init=False)

    @property
    def n_rows(self) -> int:
        """Number of rows to train on."""
        return len(self._row_lengths)

    @cached_property
    def n_windows(self) -> int:
        """Number of windows per epoch."""
        return len(self._windows)

    def batch(
        self,
        step: int,
        *,
        first: int | None = None,
        bpe_dropout: float = 0.0,
        rows: range | None = None,
    ) -> Batch:
        """Return `batch_size` windows of `context_length` + 1 tokens, or only `rows` of them.

        `first` is the number of the first window; None: as many as `step` batches have.
        Every epoch has each row once. Windows are filled up with tokens that are not targets.
        """
        assert bpe_dropout == 0
        windows = range(self.batch_size) if rows is None else rows
        first = step * self.batch_size if first is None else first
        packed = [self._window(first + i) for i in windows]
        return _make_batch(packed, self.train, self._train_starts, self.context_length)

    def val_windows(self, max_tokens: int) -> Iterator[Batch]:
        """Yield held-out rows, one per window: all, or evenly spread ones of `max_tokens`."""
        yield from _single_rows(self.val, _starts(self.val), max_tokens)

    def train_windows(self, max_tokens: int) -> Iterator[Batch]:
        """Yield rows to train on, one per window: all, or evenly spread ones of `max_tokens`."""
        yield from _single_rows(self.train, self._train_starts, max_tokens)

    @cached_property
    def _train_starts(self) -> Indices:
        return _starts(self.train)

    @cached_property
    def _row_lengths(self) -> Indices:
        return np.diff(self._train_starts)

    @cached_property
    def _windows(self) -> list[Indices]:
        """The rows of each window, as indices into the rows by decreasing length."""
        lengths = np.sort(self._row_lengths)[::-1]
        windows = assign_windows(lengths.tolist(), self.context_length + 1)
        by_window = np.argsort(windows, kind="stable")
        return np.split(by_window, np.cumsum(np.bincount(windows))[:-1])

    def _window(self, i: int) -> Indices:
        """Return the rows of the `i`-th window of the training."""
        epoch, i = divmod(i, self.n_windows)
        order, rows = self._shuffle(epoch)
        return rows[self._windows[int(order[i])]]

    def _shuffle(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the order of an epoch's windows, and its rows by decreasing length."""
        if epoch not in self._epochs:
            random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            rows = random.permutation(len(self._row_lengths))
            rows = rows[np.argsort(-self._row_lengths[rows], kind="stable")]
            for old in [one for one in self._epochs if one != epoch - 1]:  # a batch may span two
                del self._epochs[old]
            self._epochs[epoch] = random.permutation(self.n_windows), rows
        return self._epochs[epoch]


def _single_rows(tokens: Tokens, starts: Indices, max_tokens: int) -> Iterator[Batch]:
    """Yield rows, one per window: all, or evenly spread ones of `max_tokens`."""
    lengths = np.diff(starts)
    every = max(1, -(-int(lengths.sum()) // max_tokens))
    rows = np.arange(len(lengths))[::every]
    rows = rows[np.argsort(-lengths[rows], kind="stable")]  # alike lengths need little padding
    first = 0
    while first < len(rows):
        length = max(1, int(lengths[rows[first]]) - 1)
        end = first + max(1, EVAL_BATCH_TOKENS // length)
        yield _make_batch(rows[first:end, None], tokens, starts, length)
        first = end


def _make_batch(
    windows: Sequence[Indices] | Indices, tokens: Tokens, starts: Indices, length: int
) -> Batch:
    """Return windows of `length` + 1 tokens, each with some rows of `tokens`."""
    assert tokens.loss_mask is not None
    shape = (len(windows), length + 1)
    ids, in_loss = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    documents = np.zeros(shape, np.int32)
    for i, rows in enumerate(windows):
        position = 0
        for number, row in enumerate(map(int, rows)):
            part = slice(int(starts[row]), int(starts[row + 1]))
            end = position + part.stop - part.start
            ids[i, position:end] = tokens.ids[part]
            in_loss[i, position:end] = tokens.loss_mask[part]
            documents[i, position:end] = number
            position = end
        documents[i, position:] = len(rows)  # the padding
    # The first token of a row is never a target, so none is predicted from another row.
    shifted = np.ascontiguousarray(in_loss[:, 1:]), np.ascontiguousarray(documents[:, :-1])
    return Batch(ids, *shifted)


def _starts(tokens: Tokens) -> Indices:
    """(r + 1,): where each row starts, and where the last one ends."""
    assert tokens.row_lengths is not None
    starts: Indices = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens.row_lengths[:])])
    return starts


def document_lengths(tokens: Array, end_of_text: int) -> Indices:
    """(d,): the tokens of each document, its end-of-text token included."""
    ends, first = [np.zeros(1, np.int64)], 0
    for block in blocks(tokens):
        ends.append(np.flatnonzero(block == end_of_text) + first + 1)
        first += len(block)
    return np.diff(np.unique(np.concatenate([*ends, np.array([first])])))


def assign_windows(lengths: Sequence[int], capacity: int) -> Indices:
    """(r,): the window of each row; `lengths` are decreasing and at most `capacity` tokens."""
    windows = np.zeros(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # windows by free tokens
    rooms = 0  # bit n: there is a window with n free tokens
    n_windows = 0
    for i, length in enumerate(lengths):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            window, room, n_windows = n_windows, capacity, n_windows + 1
        windows[i] = window
        with_room[room - length].append(window)
        rooms |= 1 << (room - length)
    return windows
