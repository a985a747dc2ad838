"""Draft tokens from n-grams, for speculative decoding.

A draft token is the one that followed the same context before: most recently in the text itself
(prompt lookup), else most often in the training corpus, according to the model's n-gram tables. The
acceptance rate of each kind of draft is learned as the text grows. A draft ends where it saves the
most passes by these rates, minus the cost of its tokens: texts without repetition get no drafts,
and are searched after every fourth token only.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.generation.sequence import SequenceState

_CONTEXTS = (8, 4, 3, 2)  # tokens of context in the text itself, longest first
_MAX_DRAFT = 15  # tokens
_START = 0.2  # cost of the first draft token beyond that of others, for one sequence
_EXTRA = 0.2  # cost of one more token in a pass, relative to a pass with one token
_MAX_COST = 0.9
_MEMORY = 64  # drafts of a kind after which older ones count half
_MAX_PAUSE = 3  # tokens without a search, after searches that found nothing
_LONG_PAUSE = 15  # if searches save less than they cost
_SEARCHES = 16  # after which `gain` is mostly that of these
_FIRST_GAIN = 0.7  # passes saved per search, before any search
_FIRST_RATE = 0.6  # acceptance rate of drafts from the text, before any were tried
_STEP = 20  # percent: drafts from a table differ in kind by their frequency
_STEPS = 100 // _STEP
_MAX_TOKENS = 1 << 14  # indexed tokens per text, with up to eight times as many contexts

DraftToken = tuple[int, int]  # and the kind of context that it came from


def cost_per_token(batch_size: int) -> float:
    """Return the cost of one more token per sequence in a pass, relative to one with one token."""
    return _EXTRA * batch_size / (1 - _EXTRA + _EXTRA * batch_size)


class NgramTable:
    """A table of n-grams: contexts of one length and their most frequent continuation.

    `rows` (n, context + 2) are the tokens of each n-gram and in how many percent of the context's
    occurrences its last token follows.
    """

    def __init__(self, rows: NDArray[Any], vocab_size: int) -> None:
        self._base, self.length = vocab_size, rows.shape[1] - 2
        keys = np.zeros(len(rows), np.int64)
        for column in range(self.length):
            keys = keys * vocab_size + rows[:, column]
        # `bisect` reads an array of Python faster than one of NumPy; a list takes 9 times the RAM.
        self._keys, self._following, self._percent = (
            array(column.dtype.char, column.tobytes()) for column in (keys, *rows[:, -2:].T)
        )

    def look_up(self, end: Sequence[int]) -> tuple[int, int] | None:
        """Return the continuation and its percentage of occurrences, or None if unknown."""
        if len(end) < self.length:
            return None
        key = 0
        for token in end[-self.length :]:
            key = key * self._base + token
        i = bisect_left(self._keys, key)
        if i == len(self._keys) or self._keys[i] != key:
            return None
        return self._following[i], self._percent[i]


class NgramDrafter:
    """A source of drafts for each sequence, which tracks their acceptance rates.

    `search_cost` is the time of a search, relative to that of a pass with one token; `pass_cost` is
    that of Python in a pass, which one sequence saves without drafts.
    """

    def __init__(
        self,
        tables: Sequence[NgramTable] = (),
        *,
        search_cost: float = 0.0,
        pass_cost: float = 0.0,
    ) -> None:
        self._search_cost, self._pass_cost = search_cost, pass_cost
        self._tables = sorted(tables, key=lambda table: -table.length)
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
        python = self._pass_cost if batch_size == 1 else 0.0
        start = _START / batch_size + python
        if cost > _MAX_COST:  # hardly any draft is that good: do not search
            return []
        index = self._indexes.setdefault(sequence, _TextIndex())
        if len(tokens) < index.next_search:
            return []
        n_right = self._learn(index.draft, tokens[index.n_read :])
        if n := index.n_drafted:
            index.gain += (min(n_right, n) - n * cost - start - index.gain) / _SEARCHES
        else:
            index.gain -= index.gain / _SEARCHES
        index.read(tokens)
        end = list(tokens[-max(_CONTEXTS) :])
        index.draft, probability = [], 1.0
        gain, best, n_best = -start, 0.0, 0  # passes saved, minus the draft's cost
        while draft := self._next(index, end):
            index.draft.append(draft)
            token, kind = draft
            probability *= self._accepted[kind] / self._tried[kind]
            gain += probability - cost
            if probability <= cost or len(index.draft) > min(limit, _MAX_DRAFT):
                break  # not worth computing, but `_learn` will still see whether it was right
            if gain > best:
                best, n_best = gain, len(index.draft)
            end.append(token)
        index.n_drafted = n_best
        search_cost = self._search_cost + python
        pays = index.gain > search_cost or not search_cost
        index.misses = 0 if n_best and pays else index.misses + 1
        pause = min(index.misses // 2, _MAX_PAUSE) if pays else min(index.misses, _LONG_PAUSE)
        index.next_search = len(tokens) + 1 + pause
        return [token for token, _ in index.draft[:n_best]]

    def pause(self, state: SequenceState, /) -> int:
        """See `loop.Drafter`."""
        index = self._indexes.get(state.number)
        return 1 if index is None else max(1, index.next_search - len(state.tokens))

    def forget(self, sequences: Iterable[int]) -> None:
        """Drop the indexes of finished sequences."""
        for sequence in sequences:
            self._indexes.pop(sequence, None)

    def _learn(self, drafts: Sequence[DraftToken], sampled: Sequence[int]) -> int:
        """Update acceptance rates, up to the first rejected draft token; count those before it."""
        n_right = 0
        for (draft, kind), token in zip(drafts, sampled, strict=False):
            if self._tried[kind] >= _MEMORY:
                self._tried[kind] /= 2
                self._accepted[kind] /= 2
            self._tried[kind] += 1
            self._accepted[kind] += draft == token
            if draft != token:
                break
            n_right += 1
        return n_right

    def _next(self, index: "_TextIndex", end: Sequence[int]) -> DraftToken | None:
        for kind, n in enumerate(_CONTEXTS):
            token = index.following.get(tuple(end[-n:]))
            if token is not None:
                return token, kind
        for i, table in enumerate(self._tables):
            if entry := table.look_up(end):
                token, percent = entry
                step = min(percent // _STEP, _STEPS - 1)
                return token, len(_CONTEXTS) + i * _STEPS + step
        return None


class _TextIndex:
    """The contexts of one sequence and what followed them most recently."""

    def __init__(self) -> None:
        self.draft: list[DraftToken] = []
        self.following: dict[tuple[int, ...], int] = {}
        self.n_read = 0
        self.n_drafted, self.gain = 0, _FIRST_GAIN  # passes saved per search
        self.misses = 0  # searches without a draft
        self.next_search = 0  # tokens of the text at the next search

    def read(self, tokens: Sequence[int]) -> None:
        """Index the tokens that were appended since the last call."""
        if len(self.following) > 8 * _MAX_TOKENS:
            self.following.clear()
        for end in range(max(self.n_read, len(tokens) - _MAX_TOKENS), len(tokens)):
            for n in _CONTEXTS:
                if end >= n:
                    self.following[tuple(tokens[end - n : end])] = tokens[end]
        self.n_read = len(tokens)
