"""Tokens taken apart at random: the same text in other tokens at every reading.

A small text is read many times, and a model that always sees it in the same tokens learns them by
heart. Provilkov et al. 2020 (BPE-dropout) leave out merges while encoding, Sims et al. 2025
(StochasTok) divide tokens of an encoded text into any two others; here merges are undone.
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def split_tokens(
    windows: Ids, merge_pairs: Ids, *, probability: float, random: np.random.Generator
) -> tuple[Ids, Ids]:
    """(B, L) tokens, each with `probability` as the two that it was merged from, those again, and
    so on, as far as L tokens go -> (B, L), and the position in its row that each came from (B, L).

    `merge_pairs` (V, 2) has each token's two, or -1 where it stays whole.
    """
    n_rows, length = windows.shape
    tokens, positions = windows.ravel(), np.arange(windows.size)
    new = np.ones(len(tokens), bool)
    while True:
        split = new & (merge_pairs[tokens, 0] >= 0) & (random.random(len(tokens)) < probability)
        if not split.any():
            break
        counts = 1 + split
        first = (counts.cumsum() - counts)[split]
        pairs = merge_pairs[tokens[split]]
        tokens, positions, new = (a.repeat(counts) for a in (tokens, positions, split))
        tokens[first], tokens[first + 1] = pairs.T
    begins = np.searchsorted(positions, np.arange(n_rows) * length)
    index = begins[:, None] + np.arange(length)
    return tokens[index], positions[index] % length
