"""Draft tokens from n-grams, for speculative decoding.

A draft token is the one that followed the same context before: most recently in the text itself
(prompt lookup), else most often in the training corpus, according to the model's n-gram tables. The
acceptance rate of each kind of draft is learned as the text grows. A draft ends as soon as the
probability that all its tokens are accepted is below the cost of computing one more token: texts
without repetition get no drafts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.generation.sequence import SequenceState

_CONTEXTS = (8, 4, 3, 2)  # tokens of context in the text itself, longest first
_MAX_DRAFT = 15  # tokens
_EXTRA = 0.2  # cost of one more token in a pass, relative to a pass with one token
_MAX_COST = 0.9
_MEMORY = 64  # drafts of a kind after which older ones count half
_FIRST_RATE = 0.6  # acceptance rate of drafts from the text, before any were tried
_STEP = 20  # percent: drafts from a table differ in kind by their frequency
_STEPS = 100 // _STEP
_MAX_TOKENS = 1 << 14  # indexed tokens per text, with up to eight times as many contexts


def cost_per_token(batch_size: int) -> float:
    """Return the cost of one more token per sequence in a pass, relative to one with one token."""
    return _EXTRA * batch_size / (1 - _EXTRA + _EXTRA * batch_size)


class DraftToken(NamedTuple):
    """A draft token and the kind of context that it came from."""

    id: int
    kind: int


class NgramDrafter:
    """A source of drafts for each sequence, which tracks their acceptance rates."""

    def __init__(self, tables: Mapping[str, NDArray[Any]], vocab_size: int) -> None:
        longest_first = sorted(tables.values(), key=lambda rows: -rows.shape[1])
        self._tables = [_Table(rows, vocab_size) for rows in longest_first]
        rates = [_FIRST_RATE] * len(_CONTEXTS)
        for _ in self._tables:
            rates += [(step + 0.5) * _STEP / 100 for step in range(_STEPS)]
        self._tried, self._accepted = [2.0] * len(rates), [2 * rate for rate in rates]
        self._indexes: dict[int, _TextIndex] = {}

    def draft(self, states: Sequence[SequenceState], limits: Sequence[int]) -> list[list[int]]:
        """See `loop.Drafter`."""
        return [
            self.propose(state.number, state.tokens, batch_size=len(states), limit=limit)
            for state, limit in zip(states, limits, strict=True)
        ]

    def propose(
        self, sequence: int, tokens: Sequence[int], *, batch_size: int, limit: int
    ) -> list[int]:
        """Return up to `limit` draft tokens; `batch_size` sequences are computed together."""
        cost = cost_per_token(batch_size)
        if cost > _MAX_COST:  # hardly any draft is that good: do not search
            return []
        index = self._indexes.setdefault(sequence, _TextIndex())
        self._learn(index.draft, tokens[index.n_read :])
        index.read(tokens)
        end = list(tokens[-max(_CONTEXTS) :])
        index.draft, probability = [], 1.0
        while draft := self._next(index, end):
            index.draft.append(draft)
            probability *= self._accepted[draft.kind] / self._tried[draft.kind]
            if probability <= cost or len(index.draft) > min(limit, _MAX_DRAFT):
                # Not worth computing, but `_learn` will still see whether it was right.
                return [token.id for token in index.draft[:-1]]
            end.append(draft.id)
        return [token.id for token in index.draft]

    def forget(self, sequences: Iterable[int]) -> None:
        """Drop the indexes of finished sequences."""
        for sequence in sequences:
            self._indexes.pop(sequence, None)

    def _learn(self, drafts: Sequence[DraftToken], sampled: Sequence[int]) -> None:
        """Update acceptance rates, up to the first rejected draft token."""
        for draft, token in zip(drafts, sampled, strict=False):
            if self._tried[draft.kind] >= _MEMORY:
                self._tried[draft.kind] /= 2
                self._accepted[draft.kind] /= 2
            self._tried[draft.kind] += 1
            self._accepted[draft.kind] += draft.id == token
            if draft.id != token:
                return

    def _next(self, index: "_TextIndex", end: Sequence[int]) -> DraftToken | None:
        for kind, n in enumerate(_CONTEXTS):
            token = index.following.get(tuple(end[-n:]))
            if token is not None:
                return DraftToken(token, kind)
        for i, table in enumerate(self._tables):
            if entry := table.look_up(end):
                token, percent = entry
                step = min(percent // _STEP, _STEPS - 1)
                return DraftToken(token, len(_CONTEXTS) + i * _STEPS + step)
        return None


class _TextIndex:
    """The contexts of one sequence and what followed them most recently."""

    def __init__(self) -> None:
        self.draft: list[DraftToken] = []
        self.following: dict[tuple[int, ...], int] = {}
        self.n_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Index the tokens that were appended since the last call."""
        if len(self.following) > 8 * _MAX_TOKENS:
            self.following.clear()
        for end in range(max(self.n_read, len(tokens) - _MAX_TOKENS), len(tokens)):
            for n in _CONTEXTS:
                if end >= n:
                    self.following[tuple(tokens[end - n : end])] = tokens[end]
        self.n_read = len(tokens)


class _Table:
    """A table of n-grams: contexts of one length and their most frequent continuation."""

    def __init__(self, rows: NDArray[Any], vocab_size: int) -> None:
        self._base, self._n = vocab_size, rows.shape[1] - 2
        self._keys = np.zeros(len(rows), np.int64)
        for column in range(self._n):
            self._keys = self._keys * vocab_size + rows[:, column]
        self._following, self._percent = rows[:, -2], rows[:, -1]

    def look_up(self, end: Sequence[int]) -> tuple[int, int] | None:
        """Return the continuation and its percentage of occurrences, or None if unknown."""
        if len(end) < self._n:
            return None
        key = 0
        for token in end[-self._n :]:
            key = key * self._base + token
        i = int(self._keys.searchsorted(key))
        if i == len(self._keys) or self._keys[i] != key:
            return None
        return int(self._following[i]), int(self._percent[i])
