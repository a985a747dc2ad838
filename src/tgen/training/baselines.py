"""Baselines for a trained model: a compressor and an n-gram model on the held-out text.

Both use the same training text and held-out bytes as the model, so bits per byte are comparable.
"""

import lzma

import numpy as np
from numpy.typing import NDArray

Grams = NDArray[np.uint64]  # up to 8 bytes each, the last in the lowest bits
_FALLBACK = (0.5, 1.0, 1.5)  # discounts for too few counts of counts


def xz_bits_per_byte(train: bytes, held_out: bytes) -> float:
    """Return the bits that each held-out byte adds to the training text compressed by `xz -9`.

    The dictionary has 64 MiB: earlier training text has no effect.
    """
    assert held_out
    return 8 * (_xz_bytes(train + held_out) - _xz_bytes(train)) / len(held_out)


def _xz_bytes(text: bytes) -> int:
    # A larger dictionary than the text is cleared in vain.
    size = min(max(len(text), 1 << 12), 1 << 26)
    settings = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": size}
    return len(lzma.compress(text, filters=[settings]))


def ngram_bits_per_byte(train: bytes, held_out: bytes, *, order: int = 5) -> float:
    """Return the bits per byte of a byte n-gram model with `order` (0 to 7) bytes of context.

    Interpolated, modified Kneser-Ney smoothing (Chen and Goodman 1998, "An empirical study of
    smoothing techniques for language modeling", section 3) down to a uniform 1/256, counted on
    `train` only. NUL bytes precede `train`; the held-out text follows its end.
    """
    assert held_out
    assert 0 <= order <= 7, "a gram is packed into eight bytes"
    wanted = _grams((bytes(order) + train)[len(train) :] + held_out, order)
    probability = np.full(len(held_out), 1 / 256)
    for length, (grams, counts) in enumerate(_levels(train, order), 1):
        probability = _interpolate(grams, counts, _last(wanted, length), probability)
    return float(-np.log2(probability).mean())


def _grams(text: bytes, order: int) -> Grams:
    """Return each byte from index `order` on, packed with the `order` bytes before it."""
    data = np.frombuffer(text, np.uint8).astype(np.uint64)
    n = len(data) - order
    grams = np.zeros(n, np.uint64)
    for i in range(order + 1):
        grams = grams << np.uint64(8) | data[i : i + n]
    return grams


def _last(grams: Grams, length: int) -> Grams:
    """Return the last `length` bytes of each gram."""
    return grams & np.uint64((1 << 8 * length) - 1)


def _levels(train: bytes, order: int) -> list[tuple[Grams, NDArray[np.int64]]]:
    """Return sorted grams of 1, 2, ..., order + 1 bytes and their counts.

    The longest count by occurrence, shorter ones by the number of distinct bytes before them:
    "Francisco" is frequent, but only after one word.
    """
    grams, counts = np.unique(_grams(bytes(order) + train, order), return_counts=True)
    levels = [(grams, counts)]
    for length in range(order, 0, -1):
        grams, counts = np.unique(_last(grams, length), return_counts=True)
        levels.append((grams, counts))
    return levels[::-1]


def _interpolate(
    grams: Grams, counts: NDArray[np.int64], wanted: Grams, lower: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the probability (n,) of each wanted gram's last byte after its context.

    `lower` (n,) is the probability after the context without its first byte; it applies unchanged
    to unseen contexts.
    """
    if not len(grams):
        return lower
    contexts = grams >> np.uint64(8)
    first = np.flatnonzero(np.concatenate([[True], contexts[1:] != contexts[:-1]]))
    discounts = np.array([0.0, *_discounts(counts)])[np.minimum(counts, 3)]
    total = np.add.reduceat(counts.astype(np.float64), first)
    freed = np.add.reduceat(discounts, first)
    context = wanted >> np.uint64(8)
    total = _look_up(contexts[first], total, context)
    share = _look_up(grams, counts - discounts, wanted)
    share += _look_up(contexts[first], freed, context) * lower
    return np.where(total > 0, share / np.maximum(total, 1), lower)


def _discounts(counts: NDArray[np.int64]) -> tuple[float, ...]:
    """Return the discounts of grams seen once, twice and more often (their equation 26)."""
    n = [int((counts == times).sum()) for times in (1, 2, 3, 4)]
    if not all(n):
        return _FALLBACK
    y = n[0] / (n[0] + 2 * n[1])
    discounts = tuple(i - (i + 1) * y * n[i] / n[i - 1] for i in (1, 2, 3))
    # Outside these bounds a probability would be 0 or negative: too few counts for an estimate.
    possible = all(0 < discount <= i for i, discount in enumerate(discounts, 1))
    return discounts if possible else _FALLBACK


def _look_up(keys: Grams, values: NDArray[np.float64], wanted: Grams) -> NDArray[np.float64]:
    """Return the values of the wanted among the sorted keys, 0 for missing ones."""
    indices = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[indices] == wanted, values[indices], 0.0)
