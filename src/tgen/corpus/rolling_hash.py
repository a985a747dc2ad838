"""Runs of bytes compared by 64-bit fingerprints, all of a text at once.

A window's fingerprint is a polynomial of its bytes modulo 2**64 (Karp and Rabin 1987), as a
difference of sums over all of the text: any window of any length costs one subtraction.
"""

import numpy as np
from numpy.typing import NDArray

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_SIEVE_BITS = 22

Sums = tuple[NDArray[np.uint64], NDArray[np.uint64]]


def among(windows: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The indices of those windows (n,) that are among the known (m,)."""
    # The highest bits alone rule out nearly all of a long text.
    shift = np.uint64(64 - _SIEVE_BITS)
    sieve = np.zeros(1 << _SIEVE_BITS, np.bool_)
    sieve[known >> shift] = True
    maybe = np.flatnonzero(sieve[windows >> shift])
    if not len(maybe) or not len(known):
        return maybe
    known = np.sort(known)
    nearest = np.minimum(np.searchsorted(known, windows[maybe]), len(known) - 1)
    same: NDArray[np.bool_] = known[nearest] == windows[maybe]
    return maybe[same]


def sums(text: bytes) -> Sums:
    """What fingerprints are made of: sums of byte * base**place up to each place, and the inverse
    powers that move a window's sum back to place 0; modulo 2**64, both (n + 1,)."""
    data = np.frombuffer(text, np.uint8).astype(np.uint64)
    terms = data * _powers(_BASE, len(data))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    return sums, _powers(pow(_BASE, -1, 1 << 64), len(sums))


def windows(sums: Sums, starts: NDArray[np.int64], length: int) -> NDArray[np.uint64]:
    """Fingerprints of the windows of `length` bytes at `starts` (Karp and Rabin 1987)."""
    up_to, inverse = sums
    fingerprints: NDArray[np.uint64] = (up_to[starts + length] - up_to[starts]) * inverse[starts]
    return fingerprints


def _powers(base: int, n: int) -> NDArray[np.uint64]:
    """1, base, base**2, ... modulo 2**64, (n,)."""
    factors = np.full(n, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)
