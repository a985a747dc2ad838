"""What a compressor and an n-gram model make of the held-out text: yardsticks for a trained model.

Both see the same training text and are scored on the same held-out bytes, so the bits compare.
"""

import lzma

import numpy as np
from numpy.typing import NDArray

Grams = NDArray[np.uint64]  # up to 8 bytes each, the last in the lowest bits
_FALLBACK = (0.5, 1.0, 1.5)  # discounts where too few counts of counts are known


def xz_bits_per_byte(train: bytes, held_out: bytes) -> float:
    """Bits a held-out byte adds to the size of the training text under `xz -9`.

    Past 64 MiB, the dictionary of `-9`, the beginning of the training text is forgotten.
    """
    assert held_out
    more = len(lzma.compress(train + held_out, preset=9)) - len(lzma.compress(train, preset=9))
    return 8 * more / len(held_out)


def ngram_bits_per_byte(train: bytes, held_out: bytes, *, order: int = 5) -> float:
    """Bits per held-out byte of a byte n-gram model with `order` (0 to 7) bytes of context.

    Interpolated, modified Kneser-Ney smoothing (Chen and Goodman 1998, "An empirical study of
    smoothing techniques for language modeling", section 3) down to a uniform 1/256, counted on
    `train` alone. Before the text stand NUL bytes; the held-out text follows the end of `train`.
    """
    assert held_out
    assert 0 <= order <= 7, "a gram is packed into eight bytes"
    wanted = _grams((bytes(order) + train)[len(train) :] + held_out, order)
    probability = np.full(len(held_out), 1 / 256)
    for length, (grams, counts) in enumerate(_levels(train, order), 1):
        probability = _interpolate(grams, counts, _last(wanted, length), probability)
    return float(-np.log2(probability).mean())


def _grams(text: bytes, order: int) -> Grams:
    """Each byte but the first `order` with the `order` bytes before it."""
    data = np.frombuffer(text, np.uint8).astype(np.uint64)
    n = len(data) - order
    grams = np.zeros(n, np.uint64)
    for place in range(order + 1):
        grams = grams << np.uint64(8) | data[place : place + n]
    return grams


def _last(grams: Grams, length: int) -> Grams:
    """The last `length` bytes of each gram."""
    return grams & np.uint64((1 << 8 * length) - 1)


def _levels(train: bytes, order: int) -> list[tuple[Grams, NDArray[np.int64]]]:
    """Sorted grams of 1, 2, ..., order + 1 bytes and their counts.

    The longest are counted as they occur, a shorter one by how many bytes it follows: "Francisco"
    is frequent, but after one word only.
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
    """The probability of each wanted gram's last byte after the others, given the one after all of
    them but the first; both (n,). After an unseen context it is just that."""
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
    """What grams seen once, twice, and more often lend to the unseen (their equation 26)."""
    n = [int((counts == times).sum()) for times in (1, 2, 3, 4)]
    if not all(n):
        return _FALLBACK
    y = n[0] / (n[0] + 2 * n[1])
    discounts = tuple(i - (i + 1) * y * n[i] / n[i - 1] for i in (1, 2, 3))
    # Outside of these bounds a probability would be 0 or negative: too few counts to estimate from.
    possible = all(0 < discount <= i for i, discount in enumerate(discounts, 1))
    return discounts if possible else _FALLBACK


def _look_up(keys: Grams, values: NDArray[np.float64], wanted: Grams) -> NDArray[np.float64]:
    """The values of the wanted among the sorted keys, 0 where there is none."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0.0)
