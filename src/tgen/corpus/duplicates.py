"""Held-out text that is also trained on says nothing about unseen text: find it, leave it out."""

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.hold_out import Split

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_SIEVE_BITS = 22


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
    wanted, seen = _fingerprints(held_out, run), _fingerprints(train, run)
    # Their highest bits rule out nearly all of a long training text, before anything is sorted.
    shift = np.uint64(64 - _SIEVE_BITS)
    sieve = np.zeros(1 << _SIEVE_BITS, np.bool_)
    sieve[wanted >> shift] = True
    seen = np.sort(seen[sieve[seen >> shift]])
    if not len(seen):
        return 0.0
    places = np.minimum(np.searchsorted(seen, wanted), len(seen) - 1)
    starts = np.flatnonzero(seen[places] == wanted)
    edges = np.zeros(len(held_out) + 1, np.int64)
    edges[starts] += 1
    edges[starts + run] -= 1
    return float(np.count_nonzero(np.cumsum(edges)) / len(held_out))


def _fingerprints(text: bytes, run: int) -> NDArray[np.uint64]:
    """Of each window of `run` bytes (n - run + 1,): a polynomial modulo 2**64 (Karp and Rabin
    1987), as a difference of sums over all of the text."""
    data = np.frombuffer(text, np.uint8).astype(np.uint64)
    terms = data * _powers(_BASE, len(data))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    windows: NDArray[np.uint64] = sums[run:] - sums[:-run]
    return windows * _powers(pow(_BASE, -1, 1 << 64), len(windows))


def _powers(base: int, n: int) -> NDArray[np.uint64]:
    """1, base, base**2, ... modulo 2**64, (n,)."""
    factors = np.full(n, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)
