"""Logits processors: penalties, biases, banned and required strings.

Strings are matched on bytes. A token completes a string if, appended to the text so far, the string
ends inside the token, wherever the token boundaries are.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig, raw
from tgen.generation import penalties
from tgen.generation.vocabulary import Vocabulary


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
            i for text in breakers for i, token in enumerate(vocabulary.tokens) if text in token
        )
        self.inactive = not (
            sampling.penalizes or sampling.bias or sampling.ban or sampling.require
        )

    def apply(
        self,
        logits: NDArray[np.float32],
        tokens: Sequence[int],
        prompt_length: int,
        new_bytes: bytes,
        n_left: int,
    ) -> None:
        """Change the logits (V,) after `tokens` in place.

        `new_bytes` is the text after the prompt; up to `n_left` tokens may follow.
        """
        if self._sampling.penalizes:
            start = 0 if self._sampling.penalize_prompt else prompt_length
            self._penalize(logits, tokens[start:])
        for completions, bias in self._biases:
            logits[completions.after(new_bytes)] += bias
        for completions in self._bans:
            logits[completions.after(new_bytes)] = -np.inf
        missing = missing_strings(self._required, new_bytes)
        if missing:
            logits[self._ends] = -np.inf
            for completions in self._stops:
                logits[completions.after(new_bytes)] = -np.inf
            needed = [token for text in missing for token in self._vocabulary.encode(text)]
            if n_left <= len(needed):  # the last chance: force the next required token
                logits[:] = -np.inf
                logits[needed[-n_left]] = 0

    def _penalize(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> None:
        sampling = self._sampling
        window = tokens[-sampling.penalty_window :] if sampling.penalty_window else tokens
        penalties.penalize_repetition(
            logits,
            window,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )
        if sampling.dry_multiplier:
            penalties.dry(
                logits,
                window,
                multiplier=sampling.dry_multiplier,
                base=sampling.dry_base,
                allowed_length=sampling.dry_allowed_length,
                breakers=self._breakers,
            )
        if sampling.no_repeat_ngram:
            penalties.forbid_repeated_ngrams(logits, tokens, sampling.no_repeat_ngram)


def missing_strings(required: Sequence[bytes], text: bytes) -> list[bytes]:
    """Return the required strings that `text` lacks, without parts of other missing strings."""
    absent = [string for string in dict.fromkeys(required) if string not in text]
    return [s for s in absent if not any(s in other for other in absent if other != s)]
