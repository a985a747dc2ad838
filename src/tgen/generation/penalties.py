"""Penalties for tokens of the text so far: each function changes the logits (V,) in place."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray


def penalize_repetition(
    logits: NDArray[np.floating],
    seen: Sequence[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> None:
    """Penalize seen tokens: `repetition` divides positive and multiplies negative logits (Keskar et
    al. 2019), `presence` is subtracted once, `frequency` once per occurrence."""
    ids, counts = np.unique(np.asarray(seen, np.int64), return_counts=True)
    values = logits[ids]
    values = np.where(values > 0, values / repetition, values * repetition)
    logits[ids] = values - presence - frequency * counts


def forbid_repeated_ngrams(logits: NDArray[np.floating], tokens: Sequence[int], n: int) -> None:
    """Forbid each token that would repeat n tokens of the text."""
    if len(tokens) < n:
        return
    end = tuple(tokens[len(tokens) - n + 1 :])
    for i in range(len(tokens) - n + 1):
        if tuple(tokens[i : i + n - 1]) == end:
            logits[tokens[i + n - 1]] = -np.inf


def dry(
    logits: NDArray[np.floating],
    tokens: Sequence[int],
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Collection[int],
) -> None:
    """DRY: subtract multiplier * base^(n - allowed_length) from each token that would extend a
    repeat of n >= allowed_length tokens. Tokens of `breakers` end a repeat."""
    longest: dict[int, int] = {}
    last = len(tokens) - 1
    for i in range(last):  # a repeat that ends at i and at the end of the text
        n = 0
        while n <= i and tokens[i - n] == tokens[last - n] and tokens[i - n] not in breakers:
            n += 1
        if n >= allowed_length:
            longest[tokens[i + 1]] = max(n, longest.get(tokens[i + 1], 0))
    for token, n in longest.items():
        if token not in breakers:
            with np.errstate(over="ignore"):
                factor = np.float64(base) ** (n - allowed_length)
            logits[token] -= multiplier * min(factor, 1e30)
