"""What a text so far does to the logits of its next token: each function changes a row (V,)."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray


def penalise_repetition(
    logits: NDArray[np.floating],
    seen: Sequence[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> None:
    """Makes tokens that have been seen less likely.

    `repetition` divides positive and multiplies negative logits (Keskar et al. 2019); `presence` is
    taken away once, `frequency` for each time.
    """
    ids, counts = np.unique(np.asarray(seen, np.int64), return_counts=True)
    values = logits[ids]
    values = np.where(values > 0, values / repetition, values * repetition)
    logits[ids] = values - presence - frequency * counts


def forbid_repeated_ngrams(logits: NDArray[np.floating], text: Sequence[int], n: int) -> None:
    """No n tokens of the text come a second time."""
    if len(text) < n:
        return
    end = tuple(text[len(text) - n + 1 :])
    for i in range(len(text) - n + 1):
        if tuple(text[i : i + n - 1]) == end:
            logits[text[i + n - 1]] = -np.inf


def penalise_long_repeats(
    logits: NDArray[np.floating],
    text: Sequence[int],
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Collection[int],
) -> None:
    """DRY: a token that would make a repeat of n + 1 tokens longer loses
    multiplier * base^(n - allowed_length), n being at least `allowed_length`.

    No repeat reaches across a token of `breakers`.
    """
    longest: dict[int, int] = {}
    last = len(text) - 1
    for i in range(last):  # a repeat that ends at i, and once more at the end
        n = 0
        while n <= i and text[i - n] == text[last - n] and text[i - n] not in breakers:
            n += 1
        if n >= allowed_length:
            longest[text[i + 1]] = max(n, longest.get(text[i + 1], 0))
    for token, n in longest.items():
        if token not in breakers:
            with np.errstate(over="ignore"):
                times = np.float64(base) ** (n - allowed_length)
            logits[token] -= multiplier * min(times, 1e30)
