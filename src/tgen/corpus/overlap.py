"""Text that two texts share verbatim, found by comparing 64-bit rolling hashes.

The hash of a window is a polynomial of its bytes modulo 2**64 (Karp and Rabin 1987), computed as a
difference of prefix sums: any window of any length costs one subtraction.
"""

import numpy as np
from numpy.typing import NDArray

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_SIEVE_BITS = 22

PrefixSums = tuple[NDArray[np.uint64], NDArray[np.uint64]]


def overlap_fraction(train: bytes, val: bytes, *, run: int = 64) -> float:
    """Return the share (0 to 1) of `val` in runs of `run` or more bytes that occur in `train`."""
    if min(len(train), len(val)) < run:
        return 0.0
    train_hashes, val_hashes = (
        window_hashes(prefix_sums(text), np.arange(len(text) - run + 1), run)
        for text in (train, val)
    )
    starts = find_members(val_hashes, train_hashes[find_members(train_hashes, val_hashes)])
    edges = np.zeros(len(val) + 1, np.int64)
    edges[starts] += 1
    edges[starts + run] -= 1
    return float(np.count_nonzero(np.cumsum(edges)) / len(val))


def prefix_sums(text: bytes) -> PrefixSums:
    """Return the sums of byte * base**position over each prefix, and the inverse powers that shift
    a window's sum to position 0; modulo 2**64, both (n + 1,)."""
    data = np.frombuffer(text, np.uint8).astype(np.uint64)
    terms = data * _powers(_BASE, len(data))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    return sums, _powers(pow(_BASE, -1, 1 << 64), len(sums))


def window_hashes(sums: PrefixSums, starts: NDArray[np.int64], length: int) -> NDArray[np.uint64]:
    """Return the hashes of the windows of `length` bytes at `starts` (n,)."""
    prefixes, inverse = sums
    hashes: NDArray[np.uint64] = (prefixes[starts + length] - prefixes[starts]) * inverse[starts]
    return hashes


def find_members(hashes: NDArray[np.uint64], members: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the indices of the hashes (n,) that are in the set `members` (m,)."""
    # The highest bits alone exclude nearly all hashes of a long text.
    shift = np.uint64(64 - _SIEVE_BITS)
    sieve = np.zeros(1 << _SIEVE_BITS, np.bool_)
    sieve[members >> shift] = True
    candidates = np.flatnonzero(sieve[hashes >> shift])
    if not len(candidates) or not len(members):
        return candidates
    members = np.sort(members)
    nearest = np.minimum(np.searchsorted(members, hashes[candidates]), len(members) - 1)
    equal: NDArray[np.bool_] = members[nearest] == hashes[candidates]
    return candidates[equal]


def _powers(base: int, n: int) -> NDArray[np.uint64]:
    """1, base, base**2, ... modulo 2**64, (n,)."""
    factors = np.full(n, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)
