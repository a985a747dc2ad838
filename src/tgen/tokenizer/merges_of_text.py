"""The merges that a short text can need. A process with one prompt saves the time to read all.

A merge can happen only in a text that contains its result.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from tgen.tokenizer.byte_alphabet import BYTE_CHARACTERS

_MAX_BYTES = 1000  # of a text: its substrings are at most this times the longest token
_MAX_TEXTS = 4  # further ones: reading all merges once takes less time
_MAX_ADDED = 300  # added tokens, which the tokenizers library prepares anew for each text


class MergesOfText:
    """The merges of byte-level BPE in their order, each as two tokens with a space between them.

    Merges with a token that the vocabulary lacks are ignored.
    """

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[str]) -> None:
        self._vocab, self._merges = vocab, merges
        self._n_texts = 0

    def find(
        self, text: str, added: dict[str, int]
    ) -> tuple[dict[str, int], list[tuple[str, str]]] | None:
        """Return the added tokens and those that may occur in a text, with their ids, and the
        merges that give them; None if it takes less time to read all merges."""
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
        ranked = {
            rank: (token[:i], token[i:])
            for token in tokens
            for i in range(1, len(token))
            if (rank := self._ranks.get(f"{token[:i]} {token[i:]}")) is not None
            and tokens.keys() >= {token[:i], token[i:]}
        }
        return tokens | added, [ranked[rank] for rank in sorted(ranked)]

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._vocab))

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return dict(zip(self._merges, range(len(self._merges)), strict=True))
