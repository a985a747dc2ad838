"""Logits processors: penalties, biases, banned and required strings.

Strings are matched on bytes. A token completes a string if, appended to the text so far, the string
ends inside the token, wherever the token boundaries are.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig, raw
from tgen.generation import penalties
from tgen.generation.penalties import Repeats
from tgen.generation.vocabulary import Vocabulary


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
        # Stop strings are banned until all required strings are present.
        self._stops = [vocabulary.completions(text) for text in sampling.stops if self._required]
        self._bans = [vocabulary.completions(raw(text)) for text in sampling.ban]
        self._biases = [(vocabulary.completions(text), b) for text, b in sampling.biases.items()]
        breakers = [raw(text) for text in sampling.dry_breakers if sampling.dry_multiplier]
        self._breakers = frozenset(
            i for text in breakers for i in vocabulary.completions(text).containing.tolist()
        )
        self.inactive = not (
            sampling.penalizes or sampling.bias or sampling.ban or sampling.require
        )

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
    ) -> None:
        """Change the logits (V,) after `tokens` in place.

        `new_bytes` is the text after the prompt; up to `n_left` tokens may follow. `state` is the
        text's state from `new_text`; without it, everything is computed again.
        """
        if self._sampling.penalizes:
            start = 0 if self._sampling.penalize_prompt else prompt_length
            self._penalize(logits, tokens, start, state or self.new_text())
        for completions, bias in self._biases:
            logits[completions.after(new_bytes)] += bias
        for completions in self._bans:
            logits[completions.after(new_bytes)] = -np.inf
        missing = missing_strings(self._required, new_bytes)
        if missing:
            logits[self._ends] = -np.inf
            for completions in self._stops:
                logits[completions.after(new_bytes)] = -np.inf
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
            penalties.penalize_repetition(
                logits,
                tokens[recent if sampling.penalty_window else start :],
                repetition=sampling.repetition_penalty,
                presence=sampling.presence_penalty,
                frequency=sampling.frequency_penalty,
            )
        if sampling.dry_multiplier:
            state.dry.read(tokens, start)
            penalties.dry(
                logits,
                state.dry,
                multiplier=sampling.dry_multiplier,
                base=sampling.dry_base,
                allowed_length=sampling.dry_allowed_length,
                breakers=self._breakers,
            )
        if sampling.no_repeat_ngram:
            state.ngrams.read(tokens, start)
            penalties.forbid_repeated_ngrams(logits, state.ngrams, sampling.no_repeat_ngram)


def missing_strings(required: Sequence[bytes], text: bytes) -> list[bytes]:
    """Return the required strings that `text` lacks, without parts of other missing strings."""
    return _without_parts(tuple(string for string in required if string not in text))


@lru_cache(maxsize=1000)
def _without_parts(strings: tuple[bytes, ...]) -> list[bytes]:
    """Return the distinct strings that are not part of another one."""
    different = list(dict.fromkeys(strings))
    return [s for s in different if not any(s in other for other in different if other != s)]
