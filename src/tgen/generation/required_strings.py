"""Required strings: if one is still missing shortly before the end of a text, it is written where a
word ends.

A required string that starts or ends with a character of a word starts or ends there with a word.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig, raw
from tgen.errors import UsageError
from tgen.generation.vocabulary import Vocabulary
from tgen.generation.words import TAIL_BYTES, find_borders, last_word, starts_in_word

_BORDERS = (b" ", b"\n", b"-", b",")  # between a word and a required one, the first that can be
_SEARCHED_TOKENS = 12  # before the last chance of required words, to find the end of a word


class RequiredStrings:
    """The required strings of one SamplingConfig."""

    def __init__(self, sampling: SamplingConfig, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.strings = [raw(text) for text in sampling.require]
        self._words = vocabulary.known_words(sampling)
        self._excluded = [*sampling.stops, *map(raw, sampling.ban)]
        self._borders = [one for one in _BORDERS if self.strings and self._can_write(one)]
        self._sizes = {text: self._max_size(text) for text in self.strings}  # in tokens
        self._n_searched = min(_SEARCHED_TOKENS, sampling.max_new_tokens // 4)
        if self._words is not None:  # a word may grow until its end
            self._n_searched = max(self._n_searched, self._words.longest)

    def apply(
        self,
        logits: NDArray[np.float32],
        text: bytes,
        start: int,
        missing: Sequence[bytes],
        n_left: int,
        position: int,
        forced: dict[int, int],
    ) -> None:
        """Write the strings that are `missing` in a text from `start` on once they need all of the
        `n_left` tokens that may follow, or a little earlier where a word ends.

        Changes the logits (V,) of a position in place; `forced` are the text's tokens that are
        certain, by their position.
        """
        if position not in forced:
            # A string at the end of the text is missing again if its last word grows.
            uncertain = missing_strings(self.strings, text, start, certain=True)
            n_spare = n_left - sum(self._sizes[string] for string in uncertain)
            if not uncertain or n_spare > self._n_searched:
                return
            if self._words is not None:
                crossing = self._words.crossing  # the word that they begin may be too long
                logits[crossing[crossing < len(logits)]] = -np.inf
            if not missing:
                inner = self._vocabulary.inner_tokens
                logits[inner[inner < len(logits)]] = -np.inf
                return
            if n_spare > 0 and not self._is_between_words(text, int(logits.argmax()), missing[0]):
                return
            forced.update(enumerate(self.plan(text, missing), position))
        logits[:] = -np.inf
        logits[forced[position]] = 0

    def _is_between_words(self, text: bytes, top_token: int, string: bytes) -> bool:
        """Return whether a string is written well after a text that the most likely token would
        continue."""
        if self._words is not None:  # any border: there may be none after another word
            is_inner = bool(np.isin(top_token, self._vocabulary.inner_tokens))
            return not is_inner or not last_word(text[-TAIL_BYTES:])
        top = self._vocabulary.bytes_of(top_token)
        return starts_in_word(string) and (top.startswith(b" ") or text.endswith(b" "))

    def plan(self, text: bytes, missing: Sequence[bytes]) -> list[int]:
        """Return the tokens that write the missing strings after a text, between words."""
        ids: list[int] = []
        for string in missing:
            border = b""
            if starts_in_word(string):
                borders = self._borders if _needs_border(text) else [b"", *self._borders]
                possible = (one for one in borders if self._can_write(one + string, text))
                border = next(possible, b"")
            text = text[-TAIL_BYTES:] + border + string
            ids += self._vocabulary.encode(border + string)
        return ids

    def _max_size(self, string: bytes) -> int:
        """Return the number of tokens of a string, after the longest border."""
        borders = self._borders if starts_in_word(string) else []
        possible = [border + string for border in borders if self._can_write(border + string)]
        return max(len(self._vocabulary.encode(one)) for one in (string, *possible))

    def _can_write(self, string: bytes, text: bytes = b"") -> bool:
        """Return whether a string can follow a text without a banned or stop string, in tokens."""
        for excluded in self._excluded:
            if excluded in text[max(0, len(text) - len(excluded) + 1) :] + string:
                return False
        try:
            self._vocabulary.encode(string)
        except UsageError:
            return False
        return True


def missing_strings(
    required: Sequence[bytes], text: bytes, start: int = 0, *, certain: bool = False
) -> list[bytes]:
    """Return the required strings that `text` lacks from `start` on, without parts of other missing
    strings; with `certain`, also those whose last word may grow."""
    missing = [
        string
        for string in required
        if not any(sure or not certain for sure in find_borders(string, text, start))
    ]
    return _without_parts(tuple(missing))


@lru_cache(maxsize=1000)
def _without_parts(strings: tuple[bytes, ...]) -> list[bytes]:
    """Return the distinct strings that are not part of another one."""
    different = list(dict.fromkeys(strings))
    return [
        s for s in different if not any(_contains(other, s) for other in different if other != s)
    ]


def _needs_border(text: bytes) -> bool:
    ends_sentence = text.endswith((b",", b".", b";", b":", b"!", b"?"))
    return ends_sentence or bool(last_word(text[-TAIL_BYTES:]))


def _contains(text: bytes, string: bytes) -> bool:
    return any(True for _ in find_borders(string, text, 0))
