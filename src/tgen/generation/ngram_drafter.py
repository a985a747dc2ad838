"""Guesses at how a text goes on, for the engine to check several tokens in one pass.

A guess is the token that followed the same tokens before: the last time in the text itself, else
most often in the model's corpus, by its tables of n-grams. How often each kind of guess is right is
learnt as the text grows, and guesses go on only while the chance that all are right is above what
computing one more costs: where texts do not repeat themselves, nothing is guessed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_CONTEXTS = (8, 4, 3, 2)  # tokens of the text itself that are looked up
_MOST = 15  # guesses at a time
_EXTRA = 0.2  # what a pass with one token more costs, of a pass with one
_TOO_DEAR = 0.9
_MEMORY = 64  # guesses of a kind after which older ones count half
_FIRST_CHANCE = 0.6  # of a guess from the text itself, before any has been tried
_STEP = 20  # percent: guesses from a table are of different kinds by how sure it is
_STEPS = 100 // _STEP
_REMEMBERED = 1 << 14  # tokens of a text, and contexts from it eight times as many


class Guess(NamedTuple):
    """A token, and the kind of context that it came from."""

    id: int
    kind: int


class NgramDrafter:
    """What was seen in each row's text, and how good guesses have been."""

    def __init__(self, tables: Mapping[str, NDArray[Any]], vocab_size: int) -> None:
        longest_first = sorted(tables.values(), key=lambda rows: -rows.shape[1])
        self._tables = [_Table(rows, vocab_size) for rows in longest_first]
        chances = [_FIRST_CHANCE] * len(_CONTEXTS)
        for _ in self._tables:
            chances += [(step + 0.5) * _STEP / 100 for step in range(_STEPS)]
        self._tried, self._right = [2.0] * len(chances), [2 * chance for chance in chances]
        self._rows: dict[int, _Row] = {}

    def propose(self, row: int, text: Sequence[int], *, n_rows: int, most: int) -> list[int]:
        """How a row's text may go on, at most `most` tokens; `n_rows` are computed together."""
        cost = _EXTRA * n_rows / (1 - _EXTRA + _EXTRA * n_rows)
        if cost > _TOO_DEAR:  # hardly a guess is that good: not even worth looking for
            return []
        state = self._rows.setdefault(row, _Row())
        self._learn(state.guesses, text[state.n_read :])
        state.read(text)
        end = list(text[-max(_CONTEXTS) :])
        state.guesses, chance = [], 1.0
        while propose := self._next(state, end):
            state.guesses.append(propose)
            chance *= self._right[propose.kind] / self._tried[propose.kind]
            if chance <= cost or len(state.guesses) > min(most, _MOST):
                # Not worth computing; whether it was right will be known all the same.
                return [propose.id for propose in state.guesses[:-1]]
            end.append(propose.id)
        return [propose.id for propose in state.guesses]

    def forget(self, rows: Iterable[int]) -> None:
        """These rows have ended."""
        for row in rows:
            self._rows.pop(row, None)

    def _learn(self, guesses: Sequence[Guess], picked: Sequence[int]) -> None:
        """How good the guesses were, up to the first wrong one."""
        for propose, token in zip(guesses, picked, strict=False):
            if self._tried[propose.kind] >= _MEMORY:
                self._tried[propose.kind] /= 2
                self._right[propose.kind] /= 2
            self._tried[propose.kind] += 1
            self._right[propose.kind] += propose.id == token
            if propose.id != token:
                return

    def _next(self, state: "_Row", end: Sequence[int]) -> Guess | None:
        for kind, n in enumerate(_CONTEXTS):
            token = state.following.get(tuple(end[-n:]))
            if token is not None:
                return Guess(token, kind)
        for place, table in enumerate(self._tables):
            if found := table.look_up(end):
                token, percent = found
                return Guess(
                    token, len(_CONTEXTS) + place * _STEPS + min(percent // _STEP, _STEPS - 1)
                )
        return None


class _Row:
    """A row's text so far."""

    def __init__(self) -> None:
        self.guesses: list[Guess] = []
        self.following: dict[tuple[int, ...], int] = {}  # what came after a context, the last time
        self.n_read = 0

    def read(self, text: Sequence[int]) -> None:
        """Takes in what has been added to the text."""
        if len(self.following) > 8 * _REMEMBERED:
            self.following.clear()
        for end in range(max(self.n_read, len(text) - _REMEMBERED), len(text)):
            for n in _CONTEXTS:
                if end >= n:
                    self.following[tuple(text[end - n : end])] = text[end]
        self.n_read = len(text)


class _Table:
    """Contexts of one length, and what follows them."""

    def __init__(self, rows: NDArray[Any], vocab_size: int) -> None:
        self._base, self._n = vocab_size, rows.shape[1] - 2
        self._keys = np.zeros(len(rows), np.int64)
        for column in range(self._n):
            self._keys = self._keys * vocab_size + rows[:, column]
        self._following, self._percent = rows[:, -2], rows[:, -1]

    def look_up(self, end: Sequence[int]) -> tuple[int, int] | None:
        """What follows these tokens and in how many percent of cases, if it is known."""
        if len(end) < self._n:
            return None
        key = 0
        for token in end[-self._n :]:
            key = key * self._base + token
        place = int(self._keys.searchsorted(key))
        if place == len(self._keys) or self._keys[place] != key:
            return None
        return int(self._following[place]), int(self._percent[place])
