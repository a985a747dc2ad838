"""The merges that a short text can need. A process with one prompt saves the time to make all.

A merge can happen only in a text that contains its result.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from tgen.tokenizer.spec import BYTE_CHARACTERS

_MAX_BYTES = 1000  # of a text: its substrings are at most this times the longest token
_MAX_TEXTS = 4  # further ones: making all merges once takes less time
_MAX_ADDED = 300  # added tokens, which the tokenizers library prepares anew for each text


class MergesOfText:
    """The merges of byte-level BPE in their order: `pairs` returns sequences of two tokens each.

    Others, and merges with a token that the vocabulary lacks, are ignored.
    """

    def __init__(
        self, vocab: Mapping[str, int], pairs: Callable[[], Iterable[Sequence[str]]]
    ) -> None:
        self._vocab, self._pairs = vocab, pairs
        self._n_texts = 0

    def find(
        self, text: str, added: dict[str, int]
    ) -> tuple[dict[str, int], list[tuple[str, str]]] | None:
        """Return the added tokens and those that may occur in a text, with their ids, and the
        merges that give them; None if it takes less time to make all merges."""
        data = text.encode(errors="surrogatepass")
        self._n_texts += 1
        if len(data) > _MAX_BYTES or self._n_texts > _MAX_TEXTS or len(added) > _MAX_ADDED:
            return None
        spelled = "".join(map(BYTE_CHARACTERS.__getitem__, data))
        parts = {
            spelled[start:end]
            for start in range(len(spelled))
            for end in range(start + 1, min(start + self._longest, len(spelled)) + 1)
        }
        tokens = {part: self._vocab[part] for part in parts if part in self._vocab}
        merges = [
            (pair[0], pair[1])
            for pair in self._pairs()
            if pair[0] in tokens and len(pair) == 2 and pair[1] in tokens
            if "".join(pair) in tokens
        ]
        return tokens | added, merges

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._vocab))
