"""Counts of the pairs of tokens in the training text."""

import numpy as np
from numpy.typing import NDArray

from tgen.storage.disk_array import Array, blocks

_MAX_BIGRAM_TOKENS = 1 << 25  # of the text's beginning


def count_bigrams(tokens: Array, vocab_size: int) -> NDArray[np.float32]:
    """Return how often each token of `tokens` (n,) follows each other one, (V, V)."""
    counts = np.zeros(vocab_size * vocab_size, np.float32)
    previous = np.zeros(0, np.int64)
    for block in blocks(tokens[:_MAX_BIGRAM_TOKENS]):
        stream = np.concatenate([previous, block]).astype(np.int64)
        pairs, n = np.unique(stream[:-1] * vocab_size + stream[1:], return_counts=True)
        counts[pairs] += n
        previous = stream[-1:]
    return counts.reshape(vocab_size, vocab_size)
