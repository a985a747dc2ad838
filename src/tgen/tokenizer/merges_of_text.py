"""The merges that a short text can need: the whole list takes longer to read than to use once.

A merge can happen only in a text that contains its result.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from tgen.tokenizer.byte_alphabet import BYTE_CHARACTERS

_MAX_BYTES = 1000  # of one text; it has about this number times the longest token of parts
_MAX_BYTES_IN_ALL = 5000  # from then on, the whole list has paid off


class MergesOfText:
    """The merges of byte-level BPE in their order, each as two tokens with a space between them.

    Merges with a token that the vocabulary lacks are ignored.
    """

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[str]) -> None:
        self._vocab, self._merges = vocab, merges
        self._bytes_left = _MAX_BYTES_IN_ALL

    def find(self, text: str) -> tuple[dict[str, int], list[tuple[str, str]]] | None:
        """Return the tokens that may occur in a text or before its end, with their ids, and the
        merges that give them; None if the whole list is the better choice."""
        data = text.encode(errors="surrogatepass")
        self._bytes_left -= len(data)
        if len(data) > _MAX_BYTES or self._bytes_left < 0:
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
        return tokens, [ranked[rank] for rank in sorted(ranked)]

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._vocab))

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return dict(zip(self._merges, range(len(self._merges)), strict=True))
