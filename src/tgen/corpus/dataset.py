"""The tokens of a run and its batches, which are a pure function of seed and step.

Documents are concatenated in one array, which may be larger than RAM, and windows are cut from it
at any position. A batch includes each token's document and the loss mask.

BPE-dropout undoes BPE merges at random, so that each epoch sees the text in other tokens. A small
corpus is repeated for many epochs, and a model that always sees it in the same tokens memorizes
them. Provilkov et al. 2020 (BPE-dropout) skip merges while encoding, Sims et al. 2025 (StochasTok)
split tokens of an encoded text into any two others; here merges are undone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.storage.disk_array import Array, blocks

Ids = NDArray[np.int64]
EVAL_BATCH_TOKENS = 8192  # of a batch in an evaluation, with padding
_BPE_DROPOUT = 1  # purpose of these random numbers: dropout's have the same seed and step
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64


def split_tokens(
    windows: Ids, merge_pairs: Ids, *, probability: float, seeds: NDArray[np.uint64]
) -> tuple[Ids, Ids]:
    """With `probability`, replace tokens (B, L) with the two they were merged from, repeatedly.

    Returns the first L tokens of each row (B, L) and their source positions (B, L).
    `merge_pairs` (V, 2) are the two parts of a token, -1 if it is never split. A row depends only
    on its own tokens and its seed of `seeds` (B,).
    """
    n_rows, length = windows.shape
    tokens, positions = windows.ravel(), np.arange(windows.size)
    steps = np.arange(length, dtype=np.uint64) * _INCREMENT
    random = _scramble(seeds[:, None] + steps).ravel()
    is_new = np.ones(len(tokens), bool)
    while True:
        uniform = (random >> 11) * 2.0**-53
        split = is_new & (merge_pairs[tokens, 0] >= 0) & (uniform < probability)
        if not split.any():
            break
        counts = 1 + split
        first = (counts.cumsum() - counts)[split]
        pairs, drawn = merge_pairs[tokens[split]], random[split]
        tokens, positions, is_new = (a.repeat(counts) for a in (tokens, positions, split))
        random = random.repeat(counts)
        tokens[first], tokens[first + 1] = pairs.T
        random[first] = _scramble(drawn + _INCREMENT)
        random[first + 1] = _scramble(drawn - _INCREMENT)
    row_starts = np.searchsorted(positions, np.arange(n_rows) * length)
    index = row_starts[:, None] + np.arange(length)
    return tokens[index], positions[index] % length


def _scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return random bits, a function of each number (SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Batch(NamedTuple):
    """Windows of T + 1 tokens: T inputs and, shifted by one, T targets."""

    tokens: NDArray[np.int64]  # (B, T + 1)
    loss_mask: NDArray[np.bool_] | None  # (B, T): targets in the loss; None: all of them
    documents: NDArray[np.int32] | None  # (B, T): document number per input; None: one per window


@dataclass(frozen=True)
class Tokens:
    """A split of a corpus as tokens, in memory or on disk."""

    ids: Array  # (n,) uint16 or uint32
    loss_mask: Array | None = None  # (n,) bool; None: every token is in the loss
    row_lengths: Array | None = None  # (r,) int64: tokens of rows that are packed whole

    @property
    def n_targets(self) -> int:
        """Number of tokens in the loss."""
        mask = self.loss_mask
        return len(self.ids) if mask is None else sum(int(block.sum()) for block in blocks(mask))


def token_arrays(train: Tokens, val: Tokens) -> dict[str, Array]:
    """Return the arrays of a run's token file by name."""
    arrays = {
        "train": train.ids,
        "val": val.ids,
        "train_loss_mask": train.loss_mask,
        "val_loss_mask": val.loss_mask,
        "train_lengths": train.row_lengths,
        "val_lengths": val.row_lengths,
    }
    return {name: values for name, values in arrays.items() if values is not None}


def tokens_of(arrays: Mapping[str, Array]) -> tuple[Tokens, Tokens]:
    """Return the training and validation tokens of a token file; the inverse of `token_arrays`."""
    train, val = (
        Tokens(arrays[name], arrays.get(f"{name}_loss_mask"), arrays.get(f"{name}_lengths"))
        for name in ("train", "val")
    )
    return train, val


@dataclass(frozen=True)
class TokenDataset:
    """The training and validation tokens, and the order in which training sees them."""

    train: Tokens
    val: Tokens  # empty without a validation set
    val_bytes: int  # bytes of the text whose tokens are in the loss
    context_length: int
    batch_size: int
    seed: int
    end_of_text: int | None = None  # the token between documents; None: treated as one document
    begin_of_text: int | None = None  # the first token of each document; None: they have none
    merge_pairs: NDArray[np.int64] | None = None  # (V, 2), see `split_tokens`

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
        Every epoch cuts the text into windows at new positions and shuffles them, so each token but
        the first of the text is a target once per epoch. The first and the last window are shorter:
        they are filled with tokens that are not targets. With `bpe_dropout` each token is split
        with that probability; tokens pushed past the end of a window are not seen in this epoch.
        """
        length = self.context_length
        rows = range(self.batch_size) if rows is None else rows
        first = step * self.batch_size if first is None else first
        windows = [self._train_window(first + row) for row in rows]
        starts = [start for start, _ in windows]
        sizes = np.array([size for _, size in windows])
        tokens = _cut_windows(self.train.ids, starts, length + 1).astype(np.int64)
        mask = self.train.loss_mask
        mask = None if mask is None else _cut_windows(mask, starts, length + 1)
        if (sizes < length).any():
            is_inside = np.arange(length + 1) <= sizes[:, None]
            mask = is_inside if mask is None else mask & is_inside
        if bpe_dropout > 0:
            assert self.merge_pairs is not None
            sequence = np.random.SeedSequence([self.seed, step, _BPE_DROPOUT])
            seeds = sequence.generate_state(self.batch_size, np.uint64).astype(np.uint64)
            tokens, positions = split_tokens(
                tokens,
                self.merge_pairs,
                probability=bpe_dropout,
                seeds=seeds[rows.start : rows.stop],
            )
            mask = None if mask is None else np.take_along_axis(mask, positions, axis=1)
        return self._make_batch(tokens, mask, rows.start)

    def _train_window(self, i: int) -> tuple[int, int]:
        """Return the start and the number of targets of the `i`-th window of the training."""
        length, n_targets = self.context_length, len(self.train.ids) - 1
        n_windows, first_sizes = _count_windows(n_targets, length)
        epoch, i = divmod(i, n_windows)
        first_size, order = _shuffle_epoch(self.seed, epoch, n_windows, first_sizes)
        start = max(0, first_size + (int(order[i]) - 1) * length)
        return start, min(length, n_targets - start) if order[i] > 0 else first_size

    def val_windows(self, max_tokens: int) -> Iterator[Batch]:
        """Yield windows of up to context_length + 1 tokens that predict each validation token once.

        Windows overlap by one token: the first of each is the last of the one before (of the
        training text for the first). Windows without a target in the loss are omitted. If there
        are more than `max_tokens`, an evenly spread part is taken.
        """
        stream = np.concatenate([self.train.ids[-1:], self.val.ids[:]])
        mask = self.val.loss_mask
        if mask is not None:
            mask = np.concatenate([[False], mask[:]])  # the first token is not a target
        yield from self._spread_windows(stream, mask, max_tokens)

    def train_windows(self, max_tokens: int) -> Iterator[Batch]:
        """Yield about `max_tokens` of the training text, in windows spread evenly over it."""
        yield from self._spread_windows(self.train.ids, self.train.loss_mask, max_tokens)

    def _spread_windows(
        self, stream: Array, mask: Array | None, max_tokens: int
    ) -> Iterator[Batch]:
        """Yield adjacent windows with targets, or every n-th of them; the last may be shorter."""
        length = self.context_length
        starts = _window_starts(len(stream), mask, length)
        last = (len(stream) - 1) // length * length
        rest = len(stream) - 1 - last
        if mask is not None and not mask[last + 1 : last + 1 + rest].any():
            rest = 0
        n_tokens = len(starts) * length + rest
        every = max(1, -(-n_tokens // max_tokens))
        yield from self._batches(stream, mask, starts[::every], length)
        if rest > 0 and (n_tokens <= max_tokens or len(starts) == 0):
            yield from self._batches(stream, mask, np.array([last]), rest)

    def _batches(
        self, stream: Array, mask: Array | None, starts: NDArray[np.int64], length: int
    ) -> Iterator[Batch]:
        per_batch = max(1, EVAL_BATCH_TOKENS // self.context_length)
        for i in range(0, len(starts), per_batch):
            tokens = _cut_windows(stream, starts[i : i + per_batch], length + 1).astype(np.int64)
            part = None
            if mask is not None:
                part = _cut_windows(mask, starts[i : i + per_batch], length + 1)
            yield self._make_batch(tokens, part)

    def _make_batch(
        self, tokens: NDArray[np.int64], mask: NDArray[np.bool_] | None, first_row: int = 0
    ) -> Batch:
        mask = None if mask is None else np.ascontiguousarray(mask[:, 1:])
        return Batch(tokens, mask, self._number_documents(tokens[:, :-1], first_row))

    def _number_documents(
        self, tokens: NDArray[np.int64], first_row: int
    ) -> NDArray[np.int32] | None:
        """(B, T) -> each token's document, from 0 per window; None if no window has a boundary."""
        border = self.end_of_text if self.begin_of_text is None else self.begin_of_text
        starts = tokens == (-1 if border is None else border)
        starts[:, 0] = False
        if not starts.any():
            return None
        if self.begin_of_text is not None:
            return starts.cumsum(axis=1, dtype=np.int32)  # type: ignore[no-any-return]
        # An end-of-text token never sees the document it ends: the next document is predicted from
        # it alone, as from an empty prompt, and can attend to it. A prompt given by the user has
        # no such token before it. To train for both, every other token is hidden from the document
        # that follows.
        rows = first_row + np.arange(len(tokens))[:, None]
        hidden = starts & ((starts.cumsum(axis=1) + rows) % 2 == 1)
        starts[:, 1:] |= hidden[:, :-1]
        documents: NDArray[np.int32] = starts.cumsum(axis=1, dtype=np.int32)
        return documents


def _cut_windows(
    array: Array, starts: Sequence[int] | NDArray[np.int64], length: int
) -> NDArray[Any]:
    """(B, length): the elements from each start; the array wraps around at its end."""
    rows = [array[start : start + length] for start in map(int, starts)]
    return np.stack([_fill(row, array, length) for row in rows])


def _fill(row: NDArray[Any], array: Array, length: int) -> NDArray[Any]:
    while len(row) < length:
        row = np.concatenate([row, array[: length - len(row)]])
    return row


def _count_windows(n_targets: int, length: int) -> tuple[int, range]:
    """Return the number of windows per epoch and the possible sizes of the first, in targets.

    All other windows except the last have `length` targets, the last at least one. The number of
    windows allows about half of `length` different sizes of the first.
    """
    if length == 1:
        return n_targets, range(1, 2)
    if n_targets <= length // 2:  # a single window
        return 1, range(n_targets, n_targets + 1)
    n_windows = (n_targets + (length - 1) // 2) // length + 1
    least = max(1, n_targets - (n_windows - 1) * length)
    most = min(length, n_targets - (n_windows - 2) * length - 1)
    return n_windows, range(least, most + 1)


def _window_starts(n_tokens: int, mask: Array | None, length: int) -> NDArray[np.int64]:
    """Return the starts of adjacent windows, without those that have no target in the loss."""
    starts = np.arange((n_tokens - 1) // length) * length
    if mask is None:
        return starts
    per_block = max(1, (1 << 22) // length)  # windows
    has_target = [
        mask[first + 1 : first + per_block * length + 1][: (len(starts) * length - first)]
        .reshape(-1, length)
        .any(axis=1)
        for first in range(0, len(starts) * length, per_block * length)
    ]
    selected: NDArray[np.int64] = starts[np.concatenate([np.zeros(0, bool), *has_target])]
    return selected


@lru_cache(maxsize=2)  # a batch may span two epochs
def _shuffle_epoch(
    seed: int, epoch: int, n_windows: int, offsets: range
) -> tuple[int, NDArray[np.int64]]:
    """Return one of the offsets of an epoch's windows, and their order."""
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return offsets[int(random.integers(len(offsets)))], random.permutation(n_windows)
