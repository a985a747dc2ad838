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


class Repeats:
    """The tokens that penalties consider, and the lengths of earlier repeats of their end.

    `ids` (n,) are the tokens. `lengths` (n - 1,): the lengths[i] tokens up to position i equal the
    last lengths[i] tokens. Reading one more token takes O(n) array operations; reading many takes
    O(n) steps.
    """

    def __init__(self, *, window: int = 0, breakers: Collection[int] = ()) -> None:
        """Consider the last `window` tokens, or all (0); tokens of `breakers` end a repeat."""
        self._window, self._breakers = window, breakers
        self._n_read = 0
        self.ids = np.zeros(0, np.int64)
        self.lengths = np.zeros(0, np.int64)

    def read(self, tokens: Sequence[int], start: int = 0) -> None:
        """Read the tokens from `start` on that were appended since the last call."""
        new = tokens[max(start, self._n_read) :]
        self._n_read = len(tokens)
        if len(new) == 1 and len(self.ids):
            self._append(new[0])
        elif new:
            self.ids = np.concatenate([self.ids, np.asarray(new, np.int64)])[-self._window :]
            self.lengths = np.array(_repeat_lengths(self.ids.tolist(), self._breakers), np.int64)

    def _append(self, token: int) -> None:
        one_longer = np.concatenate([[1], self.lengths + 1])
        if token in self._breakers:
            one_longer[:] = 0
        self.lengths = np.where(self.ids == token, one_longer, 0)
        self.ids = np.append(self.ids, token)
        excess = len(self.ids) - self._window
        if self._window and excess > 0:
            self.ids, self.lengths = self.ids[excess:], self.lengths[excess:]
            # A repeat starts inside the window.
            np.minimum(self.lengths, np.arange(1, len(self.ids)), out=self.lengths)


def _repeat_lengths(tokens: list[int], breakers: Collection[int]) -> list[int]:
    """Return `Repeats.lengths` by the Z function of the reversed tokens, in linear time."""
    ends = tokens[::-1]
    limit = next((i for i, token in enumerate(ends) if token in breakers), len(ends))
    lengths = [0] * len(ends)  # of the longest common prefix of ends and ends[i:]
    left = right = 0  # the match ends[left:right] that ends last
    for i in range(1, len(ends)):
        n = min(right - i, lengths[i - left]) if i < right else 0
        while i + n < len(ends) and ends[n] == ends[i + n]:
            n += 1
        if i + n > right:
            left, right = i, i + n
        lengths[i] = n
    return [min(n, limit) for n in lengths[:0:-1]]


def forbid_repeated_ngrams(logits: NDArray[np.floating], repeats: Repeats, n: int) -> None:
    """Forbid each token that would repeat n tokens of the text."""
    following = repeats.ids[1:][repeats.lengths >= n - 1]
    logits[following] = -np.inf
    if n == 1:
        logits[repeats.ids[:1]] = -np.inf


def dry(
    logits: NDArray[np.floating],
    repeats: Repeats,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Collection[int],
) -> None:
    """DRY: subtract multiplier * base^(n - allowed_length) from each token that would extend a
    repeat of n >= allowed_length tokens, unless it is one of `breakers`."""
    repeated = repeats.lengths >= allowed_length
    longest = np.zeros(len(logits), np.int64)
    np.maximum.at(longest, repeats.ids[1:][repeated], repeats.lengths[repeated])
    with np.errstate(over="ignore"):
        for token in np.flatnonzero(longest).tolist():
            if token not in breakers:
                factor = np.float64(base) ** (int(longest[token]) - allowed_length)
                logits[token] -= multiplier * min(factor, 1e30)
