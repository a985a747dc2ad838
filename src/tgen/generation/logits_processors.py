"""What makes tokens likelier, less likely or impossible: penalties, strings, and a given form.

Strings are matched on bytes. A token would complete a string if, put behind what has been
written, the string stands there and reaches into the token: wherever the borders of tokens fall.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig, raw
from tgen.generation import penalties
from tgen.generation.token_bytes import Vocabulary

Row = NDArray[np.float32]  # (V,)


class LogitsProcessors:
    """The rules of one text and those that are to be like it."""

    def __init__(self, sampling: SamplingConfig, vocabulary: Vocabulary) -> None:
        self._sampling, self._vocabulary = sampling, vocabulary
        self._ends = sorted(vocabulary.ends)
        self._required = [raw(text) for text in sampling.require]
        # Texts that end by themselves would end before what is required is there.
        self._enders = [vocabulary.completions(text) for text in sampling.stops if self._required]
        self._bans = [vocabulary.completions(raw(text)) for text in sampling.ban]
        self._biases = [(vocabulary.completions(text), b) for text, b in sampling.biases.items()]
        breakers = [raw(text) for text in sampling.dry_breakers if sampling.dry_multiplier]
        self._breakers = frozenset(
            i for text in breakers for i, token in enumerate(vocabulary.tokens) if text in token
        )
        self.idle = not (sampling.penalises or sampling.bias or sampling.ban or sampling.require)

    def apply(
        self, logits: Row, text: Sequence[int], prompt_length: int, written: bytes, n_left: int
    ) -> None:
        """Changes the logits after a text, whose first `prompt_length` tokens are a prompt; `written` is
        the rest as bytes, and `n_left` tokens may still come."""
        if self._sampling.penalises:
            self._penalise(logits, text if self._sampling.penalize_prompt else text[prompt_length:])
        for completions, bias in self._biases:
            logits[completions.after(written)] += bias
        for completions in self._bans:
            logits[completions.after(written)] = -np.inf
        needed = missing(self._required, written)
        if needed:
            logits[self._ends] = -np.inf
            for completions in self._enders:
                logits[completions.after(written)] = -np.inf
            planned = [token for text in needed for token in self._vocabulary.encode(text)]
            if n_left <= len(planned):  # now or never
                logits[:] = -np.inf
                logits[planned[-n_left]] = 0

    def _penalise(self, logits: Row, text: Sequence[int]) -> None:
        sampling = self._sampling
        window = text[-sampling.penalty_window :] if sampling.penalty_window else text
        penalties.penalise_repetition(
            logits,
            window,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )
        if sampling.dry_multiplier:
            penalties.penalise_long_repeats(
                logits,
                window,
                multiplier=sampling.dry_multiplier,
                base=sampling.dry_base,
                allowed_length=sampling.dry_allowed_length,
                breakers=self._breakers,
            )
        if sampling.no_repeat_ngram:
            penalties.forbid_repeated_ngrams(logits, text, sampling.no_repeat_ngram)


def missing(required: Sequence[bytes], written: bytes) -> list[bytes]:
    """What still has to be written; what is a part of another comes with it."""
    absent = [text for text in dict.fromkeys(required) if text not in written]
    return [text for text in absent if not any(text in other for other in absent if other != text)]
