"""Logits processors: penalties, biases, banned and required strings.

Penalties concern the tokens of the text so far; each of their functions changes the logits (V,) in
place. Strings are matched on bytes. A token completes a string if, appended to the text so far, the
string ends inside the token, wherever the token boundaries are.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig, raw
from tgen.generation.required_strings import RequiredStrings, missing_strings
from tgen.generation.vocabulary import Vocabulary
from tgen.generation.words import TAIL_BYTES


def penalize_repetition(
    logits: NDArray[np.floating], counts: Mapping[int, int], sampling: SamplingConfig
) -> None:
    """Penalize tokens, which occur `counts` times: the repetition penalty divides positive and
    multiplies negative logits (Keskar et al. 2019), the presence penalty is subtracted once, the
    frequency penalty once per occurrence."""
    factor = sampling.repetition_penalty
    ids = np.fromiter(counts, np.int64, len(counts))
    values = logits[ids]
    values = np.where(values > 0, values / factor, values * factor)
    logits[ids] = values - sampling.presence_penalty
    if sampling.frequency_penalty:
        numbers = np.fromiter(counts.values(), np.int64, len(counts))
        logits[ids] -= sampling.frequency_penalty * numbers


class Occurrences:
    """Counts of the tokens in a text, or in its last `window` tokens (0: in all)."""

    def __init__(self, window: int) -> None:
        self._window, self._n_read = window, 0
        self.counts: dict[int, int] = {}

    def read(self, tokens: Sequence[int], start: int = 0) -> None:
        """Read the tokens from `start` on that were appended since the last call."""
        for i in range(max(start, self._n_read), len(tokens)):
            self.counts[tokens[i]] = self.counts.get(tokens[i], 0) + 1
            if self._window and i - self._window >= start:
                left = tokens[i - self._window]
                self.counts[left] -= 1
                if not self.counts[left]:
                    del self.counts[left]
        self._n_read = len(tokens)


class Repeats:
    """The tokens that penalties consider, and the lengths of earlier repeats of their end.

    `ids` (n,) are the tokens. `lengths` (n - 1,): the lengths[i] tokens up to position i equal the
    last lengths[i] tokens. Reading one more token takes O(n) array operations; reading many takes
    O(n) steps.
    """

    def __init__(self, *, window: int = 0, breakers: Collection[int] = ()) -> None:
        """Consider the last `window` tokens, or all (0); tokens of `breakers` end a repeat."""
        self._window, self.breakers = window, breakers
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
            self.lengths = np.array(_repeat_lengths(self.ids.tolist(), self.breakers), np.int64)

    def _append(self, token: int) -> None:
        one_longer = np.concatenate([[1], self.lengths + 1])
        if token in self.breakers:
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


def dry(logits: NDArray[np.floating], repeats: Repeats, sampling: SamplingConfig) -> None:
    """DRY: subtract multiplier * base^(n - allowed_length) from each token that would extend a
    repeat of n >= allowed_length tokens, unless it is a breaker."""
    repeated = repeats.lengths >= sampling.dry_allowed_length
    longest = np.zeros(len(logits), np.int64)
    np.maximum.at(longest, repeats.ids[1:][repeated], repeats.lengths[repeated])
    with np.errstate(over="ignore"):
        for token in np.flatnonzero(longest).tolist():
            if token not in repeats.breakers:
                n_more = int(longest[token]) - sampling.dry_allowed_length
                factor = np.float64(sampling.dry_base) ** n_more
                logits[token] -= sampling.dry_multiplier * min(factor, 1e30)


class TextState(NamedTuple):
    """State of the processors for one text."""

    seen: Occurrences
    dry: Repeats
    ngrams: Repeats
    before: bytes  # end of the prompt
    forced: dict[int, int]  # tokens of required strings, by position

    def fork(self) -> "TextState":
        """Return a copy that can read other tokens."""
        seen = copy(self.seen)
        seen.counts = {**seen.counts}
        return TextState(seen, copy(self.dry), copy(self.ngrams), self.before, {**self.forced})


class LogitsProcessors:
    """All processors of one SamplingConfig, shared by the sequences that use it."""

    def __init__(self, sampling: SamplingConfig, vocabulary: Vocabulary) -> None:
        self._sampling, self._vocabulary = sampling, vocabulary
        self._ends = sorted(vocabulary.ends)
        self._required = RequiredStrings(sampling, vocabulary)
        self._words = vocabulary.known_words(sampling)
        # Stop strings are banned until all required strings and enough tokens are present.
        is_late = bool(sampling.require or sampling.min_tokens)
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
            *(sampling.logit_bias, sampling.min_tokens, sampling.ignore_eos, self._words),
        )
        self.inactive = not any(active)

    @property
    def reads_prompt(self) -> bool:
        """Whether `new_text` needs the end of the prompt."""
        return bool(self._sampling.require or self._words)

    def new_text(self, before: bytes = b"") -> TextState:
        """Return the state of a new text, for `apply`; `before` is the end of its prompt."""
        sampling = self._sampling
        window = Repeats(window=sampling.penalty_window, breakers=self._breakers)
        seen = Occurrences(sampling.penalty_window)
        return TextState(seen=seen, dry=window, ngrams=Repeats(), before=before, forced={})

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
        state = state or self.new_text()
        if self._words is not None:
            tail = new_bytes if len(new_bytes) >= TAIL_BYTES else state.before + new_bytes
            all_ends = [*self._ends, *ends, *self._sampling.stop_token_ids]
            self._words.apply(logits, tail[-TAIL_BYTES:], all_ends)
        if self._sampling.penalizes:
            start = 0 if self._sampling.penalize_prompt else prompt_length
            self._penalize(logits, tokens, start, state)
        for completions, bias in self._biases:
            logits[completions.after(new_bytes)] += bias
        if len(self._biased_ids):
            logits[self._biased_ids] += self._id_biases
        for completions in self._bans:
            logits[completions.after(new_bytes)] = -np.inf
        text, n_before = state.before + new_bytes, len(state.before)
        missing = missing_strings(self._required.strings, text, n_before)
        is_early = len(tokens) - prompt_length < self._sampling.min_tokens
        if missing or is_early or self._sampling.ignore_eos:
            logits[[*self._ends, *ends]] = -np.inf
        if missing or is_early:
            logits[[*self._sampling.stop_token_ids]] = -np.inf
            for completions in self._stops:
                logits[completions.after(new_bytes)] = -np.inf
        if self._sampling.require:
            self._required.apply(logits, text, n_before, missing, n_left, len(tokens), state.forced)

    def _penalize(
        self, logits: NDArray[np.float32], tokens: Sequence[int], start: int, state: TextState
    ) -> None:
        sampling = self._sampling
        if sampling.penalizes_occurrence:
            state.seen.read(tokens, start)
            penalize_repetition(logits, state.seen.counts, sampling)
        if sampling.dry_multiplier:
            state.dry.read(tokens, start)
            dry(logits, state.dry, sampling)
        if sampling.no_repeat_ngram:
            state.ngrams.read(tokens, start)
            forbid_repeated_ngrams(logits, state.ngrams, sampling.no_repeat_ngram)
