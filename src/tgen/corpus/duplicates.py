"""Held-out text that is also trained on says nothing about unseen text: find it, leave it out."""

import numpy as np

from tgen.corpus.hold_out import Split
from tgen.fingerprints import among, sums, windows


def drop_duplicates(split: Split) -> tuple[Split, int, int]:
    """The split without the held-out documents that equal a training document; how many documents
    and how many bytes that took away.

    The two pieces of a cut document are no documents: they stay, so that the border still lies
    between the last of `train` and the first of `held_out`, and equal nothing.
    """
    pieces = 1 if split.cut else 0
    trained = set(split.train[: len(split.train) - pieces])
    whole = split.held_out[pieces:]
    kept = split.held_out[:pieces] + [document for document in whole if document not in trained]
    dropped = [document for document in whole if document in trained]
    n_bytes = sum(len(part) for document in dropped for part in document)
    return split._replace(held_out=kept), len(dropped), n_bytes


def shared_share(train: bytes, held_out: bytes, *, run: int = 64) -> float:
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
