"""Documents -> tokens -> the batches of a run, a pure function of seed and step."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.documents import Document
from tgen.tokenizer import Tokenizer

Tokens = NDArray[np.uint16 | np.uint32]


def tokenise(
    documents: Iterable[Document], tokenizer: Tokenizer, *, open_end: bool = False
) -> Tokens:
    """All documents as one array (n,), an end-of-text token after each where the tokenizer has one;
    with `open_end` not after the last, which goes on elsewhere."""
    kind = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    parts: list[NDArray[np.uint32]] = []
    for document in documents:
        parts += [tokenizer.encode_array(part) for part in document]
        if tokenizer.end_of_text is not None:
            parts.append(np.array([tokenizer.end_of_text], np.uint32))
    if open_end and tokenizer.end_of_text is not None:
        del parts[-1]
    tokens: Tokens = np.concatenate([np.zeros(0, np.uint32), *parts]).astype(kind)
    return tokens


@dataclass(frozen=True)
class TokenStore:
    """The tokens of a run and the order they are seen in, a pure function of seed and step."""

    train: Tokens  # (n,)
    held_out: Tokens  # (m,); empty: nothing is held out
    held_out_bytes: int
    context_length: int
    batch_size: int
    seed: int

    @property
    def held_out_tokens(self) -> int:
        """Tokens held out."""
        return len(self.held_out)

    def batch(self, step: int) -> NDArray[np.int64]:
        """Step `step`'s windows, (batch_size, context_length + 1): inputs and, shifted, targets.

        Every epoch cuts the text into windows at a new offset and deals them in a new order, so
        each token is seen once an epoch.
        """
        length = self.context_length
        per_epoch = max(1, (len(self.train) - 1) // length)
        windows = np.empty((self.batch_size, length + 1), np.int64)
        for row in range(self.batch_size):
            epoch, i = divmod(step * self.batch_size + row, per_epoch)
            offset, order = _epoch(self.seed, epoch, per_epoch, len(self.train) - length)
            start = (offset + order[i] * length) % (len(self.train) - length)
            windows[row] = self.train[start : start + length + 1]
        return windows

    def held_out_windows(self, max_tokens: int) -> Iterator[NDArray[np.int64]]:
        """Windows (n, up to context_length + 1) that predict each held-out token exactly once.

        They do not overlap but for the first token of each, which is the last of the one before
        (of the training text for the first). More than `max_tokens` are thinned out evenly.
        """
        length = self.context_length
        stream = np.concatenate([self.train[-1:], self.held_out]).astype(np.int64)
        n_full = (len(stream) - 1) // length
        starts = np.arange(n_full) * length
        if len(self.held_out) > max_tokens:
            starts = starts[:: -(-len(self.held_out) // max_tokens)]
        per_batch = max(1, 8192 // length)
        for i in range(0, len(starts), per_batch):
            yield stream[starts[i : i + per_batch, None] + np.arange(length + 1)]
        if len(stream) - 1 > n_full * length and len(self.held_out) <= max_tokens:
            yield stream[None, n_full * length :]


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def _epoch(seed: int, epoch: int, n_windows: int, n_starts: int) -> tuple[int, NDArray[np.int64]]:
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return int(random.integers(n_starts)), random.permutation(n_windows)
