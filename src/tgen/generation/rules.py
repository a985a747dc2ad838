"""What the text so far makes likelier, less likely or impossible: penalties, and strings.

Strings are matched on bytes. A token would complete a string if, put behind what has been
written, the string stands there and reaches into the token: wherever the borders of tokens fall.
"""

from collections.abc import Collection, Sequence

import numpy as np

from tgen.config import SamplingConfig, StringConfig
from tgen.engine.base import Logits
from tgen.generation import penalties
from tgen.generation.completions import Completions


class Rules:
    """The rules of one run; `vocabulary` are the tokens' bytes, needed where there are strings."""

    def __init__(
        self,
        sampling: SamplingConfig,
        strings: StringConfig | None = None,
        vocabulary: Sequence[bytes] = (),
        end_ids: Collection[int] = (),
    ) -> None:
        strings = strings or StringConfig()
        self._sampling, self._vocabulary = sampling, vocabulary
        self._biases = [(Completions(text, vocabulary), b) for text, b in strings.biases.items()]
        self._required, self._end_ids = strings.required, list(end_ids)
        breakers = strings.breakers if sampling.dry_multiplier else ()
        broken = [any(text in token for text in breakers) for token in vocabulary]
        self._breakers = frozenset(np.flatnonzero(broken).tolist())
        self._idle = not (sampling.penalises or strings.biases or strings.required)

    def apply(
        self, logits: Logits, texts: Sequence[Sequence[int]], n_given: Sequence[int]
    ) -> Logits:
        """Logits (B, V) after each row's text, which begins with a prompt of `n_given` tokens."""
        if self._idle:
            return logits
        logits = logits.copy()
        for row, text, given in zip(logits, texts, n_given, strict=True):
            if self._sampling.penalises:
                self._penalise(row, text if self._sampling.penalize_prompt else text[given:])
            if self._biases or self._required:
                written = b"".join(self._vocabulary[token] for token in text[given:])
                for completions, bias in self._biases:
                    row[completions.after(written)] += bias
                if not all(string in written for string in self._required):
                    row[self._end_ids] = -np.inf
        return logits

    def _penalise(self, row: Logits, text: Sequence[int]) -> None:
        sampling = self._sampling
        window = text[-sampling.penalty_window :] if sampling.penalty_window else text
        penalties.penalise_repetition(
            row,
            window,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )
        if sampling.dry_multiplier:
            penalties.penalise_long_repeats(
                row,
                window,
                multiplier=sampling.dry_multiplier,
                base=sampling.dry_base,
                allowed_length=sampling.dry_allowed_length,
                breakers=self._breakers,
            )
        if sampling.no_repeat_ngram:
            penalties.forbid_repeated_ngrams(row, text, sampling.no_repeat_ngram)
