"""Logits processors: penalties, biases, banned and required strings.

Penalties concern the tokens of the text so far; each of their functions changes the logits (V,) in
place. Strings are matched on bytes. A token completes a string if, appended to the text so far, the
string ends inside the token, wherever the token boundaries are.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig, raw
from tgen.generation.vocabulary import Vocabulary


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


class TextState(NamedTuple):
    """State of the penalties for one text."""

    dry: Repeats
    ngrams: Repeats


class LogitsProcessors:
    """All processors of one SamplingConfig, shared by the sequences that use it."""

    def __init__(self, sampling: SamplingConfig, vocabulary: Vocabulary) -> None:
        self._sampling, self._vocabulary = sampling, vocabulary
        self._ends = sorted(vocabulary.ends)
        self._required = [raw(text) for text in sampling.require]
        # Stop strings are banned until all required strings and enough tokens are present.
        is_late = bool(self._required or sampling.min_tokens)
        self._stops = [vocabulary.completions(text) for text in sampling.stops if is_late]
        by_id = dict(sampling.logit_bias)
        self._biased_ids = np.array([*by_id], np.int64)
        self._id_biases = np.array([*by_id.values()], np.float32)
        self._bans = [vocabulary.completions(raw(text)) for text in sampling.ban]
        self._biases = [(vocabulary.completions(text), b) for text, b in sampling.biases.items()]
        breakers = [raw(text) for text in sampling.dry_breakers if sampling.dry_multiplier]
        self._breakers = frozenset(
            i for text in breakers for i in vocabulary.completions(text).containing.tolist()
        )
        active = (
            *(sampling.penalizes, sampling.bias, sampling.ban, sampling.require),
            *(sampling.logit_bias, sampling.min_tokens, sampling.ignore_eos),
        )
        self.inactive = not any(active)

    def new_text(self) -> TextState:
        """Return the state of a new text, for `apply`."""
        sampling = self._sampling
        window = Repeats(window=sampling.penalty_window, breakers=self._breakers)
        return TextState(dry=window, ngrams=Repeats())

    def apply(
        self,
        logits: NDArray[np.float32],
        tokens: Sequence[int],
        prompt_length: int,
        new_bytes: bytes,
        n_left: int,
        state: TextState | None = None,
        ends: Collection[int] = (),
    ) -> None:
        """Change the logits (V,) after `tokens` in place.

        `new_bytes` is the text after the prompt; up to `n_left` tokens may follow. `state` is the
        text's state from `new_text`; without it, everything is computed again. `ends` are the
        text's end tokens besides the vocabulary's.
        """
        if self._sampling.penalizes:
            start = 0 if self._sampling.penalize_prompt else prompt_length
            self._penalize(logits, tokens, start, state or self.new_text())
        for completions, bias in self._biases:
            logits[completions.after(new_bytes)] += bias
        if len(self._biased_ids):
            logits[self._biased_ids] += self._id_biases
        for completions in self._bans:
            logits[completions.after(new_bytes)] = -np.inf
        missing = missing_strings(self._required, new_bytes)
        is_early = len(tokens) - prompt_length < self._sampling.min_tokens
        if missing or is_early or self._sampling.ignore_eos:
            logits[[*self._ends, *ends]] = -np.inf
        if missing or is_early:
            logits[[*self._sampling.stop_token_ids]] = -np.inf
            for completions in self._stops:
                logits[completions.after(new_bytes)] = -np.inf
        if missing:
            needed = [self._vocabulary.encode(text) for text in missing]
            n_needed = sum(map(len, needed))
            if n_left <= n_needed:  # the last chance: force the next required token
                logits[:] = -np.inf
                logits[list(chain(*needed))[n_needed - n_left]] = 0

    def _penalize(
        self, logits: NDArray[np.float32], tokens: Sequence[int], start: int, state: TextState
    ) -> None:
        sampling = self._sampling
        if sampling.penalizes_occurrence:
            recent = max(start, len(tokens) - sampling.penalty_window)
            penalize_repetition(
                logits,
                tokens[recent if sampling.penalty_window else start :],
                repetition=sampling.repetition_penalty,
                presence=sampling.presence_penalty,
                frequency=sampling.frequency_penalty,
            )
        if sampling.dry_multiplier:
            state.dry.read(tokens, start)
            dry(
                logits,
                state.dry,
                multiplier=sampling.dry_multiplier,
                base=sampling.dry_base,
                allowed_length=sampling.dry_allowed_length,
                breakers=self._breakers,
            )
        if sampling.no_repeat_ngram:
            state.ngrams.read(tokens, start)
            forbid_repeated_ngrams(logits, state.ngrams, sampling.no_repeat_ngram)


def missing_strings(required: Sequence[bytes], text: bytes) -> list[bytes]:
    """Return the required strings that `text` lacks, without parts of other missing strings."""
    return _without_parts(tuple(string for string in required if string not in text))


@lru_cache(maxsize=1000)
def _without_parts(strings: tuple[bytes, ...]) -> list[bytes]:
    """Return the distinct strings that are not part of another one."""
    different = list(dict.fromkeys(strings))
    return [s for s in different if not any(s in other for other in different if other != s)]
