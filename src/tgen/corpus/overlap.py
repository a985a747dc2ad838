"""How much of the held-out text is also trained on, in passages where documents differ."""

import numpy as np

from tgen.corpus.rolling_hash import among, sums, windows


def overlap_fraction(train: bytes, held_out: bytes, *, run: int = 64) -> float:
    """The share (0 to 1) of held-out bytes in runs of `run` or more that `train` has verbatim.

    Runs are compared by fingerprints of 64 bits.
    """
    if min(len(train), len(held_out)) < run:
        return 0.0
    of_train, of_held_out = (
        windows(sums(text), np.arange(len(text) - run + 1), run) for text in (train, held_out)
    )
    starts = among(of_held_out, of_train[among(of_train, of_held_out)])
    edges = np.zeros(len(held_out) + 1, np.int64)
    edges[starts] += 1
    edges[starts + run] -= 1
    return float(np.count_nonzero(np.cumsum(edges)) / len(held_out))
