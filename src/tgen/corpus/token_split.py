"""Tokens taken apart at random: the same text in other tokens at every reading.

A small text is read many times, and a model that always sees it in the same tokens learns them by
heart. Provilkov et al. 2020 (BPE-dropout) leave out merges while encoding; here, where the text is
encoded already, merges are undone.
"""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def take_apart(
    windows: Ids, halves: Ids, share: float, random: np.random.Generator
) -> tuple[Ids, Ids]:
    """(B, L) tokens, each with the probability `share` as the two that it was merged from, those
    again, and so on, as far as L tokens go -> (B, L), and where in its row each came from (B, L).

    `halves` (V, 2) has each token's two, or -1 where it was not merged.
    """
    n_rows, length = windows.shape
    tokens, places = windows.ravel(), np.arange(windows.size)
    new = np.ones(len(tokens), bool)
    while True:
        split = new & (halves[tokens, 0] >= 0) & (random.random(len(tokens)) < share)
        if not split.any():
            break
        counts = 1 + split
        first = (counts.cumsum() - counts)[split]
        pairs = halves[tokens[split]]
        tokens, places, new = (a.repeat(counts) for a in (tokens, places, split))
        tokens[first], tokens[first + 1] = pairs.T
    begins = np.searchsorted(places, np.arange(n_rows) * length)
    index = begins[:, None] + np.arange(length)
    return tokens[index], places[index] % length
