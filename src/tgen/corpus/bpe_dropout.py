"""BPE-dropout: undo BPE merges at random, so that each epoch sees the text in other tokens.

A small corpus is repeated for many epochs, and a model that always sees it in the same tokens
memorizes them. Provilkov et al. 2020 (BPE-dropout) skip merges while encoding, Sims et al. 2025
(StochasTok) split tokens of an encoded text into any two others; here merges are undone.
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def split_tokens(
    windows: Ids, merge_pairs: Ids, *, probability: float, random: np.random.Generator
) -> tuple[Ids, Ids]:
    """With `probability`, replace tokens (B, L) with the two they were merged from, repeatedly.

    Returns the first L tokens of each row (B, L) and their source positions (B, L).
    `merge_pairs` (V, 2) are the two parts of a token, -1 if it is never split.
    """
    n_rows, length = windows.shape
    tokens, positions = windows.ravel(), np.arange(windows.size)
    is_new = np.ones(len(tokens), bool)
    while True:
        split = is_new & (merge_pairs[tokens, 0] >= 0) & (random.random(len(tokens)) < probability)
        if not split.any():
            break
        counts = 1 + split
        first = (counts.cumsum() - counts)[split]
        pairs = merge_pairs[tokens[split]]
        tokens, positions, is_new = (a.repeat(counts) for a in (tokens, positions, split))
        tokens[first], tokens[first + 1] = pairs.T
    row_starts = np.searchsorted(positions, np.arange(n_rows) * length)
    index = row_starts[:, None] + np.arange(length)
    return tokens[index], positions[index] % length
