"""What the loop knows of a tokenizer: the bytes of every token, and which tokens end a text."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tgen.generation.constrained import Grammars


class Vocabulary:
    """`tokens` are the bytes by id; without them texts are ids alone, and strings mean nothing.

    `encode` gives the ids of bytes within a text; only what is required needs it.
    """

    def __init__(
        self,
        tokens: Sequence[bytes] = (),
        ends: Collection[int] = (),
        encode: Callable[[bytes], Sequence[int]] = list,
    ) -> None:
        self.ends, self.encode = frozenset(ends), lru_cache(maxsize=1000)(encode)
        self.tokens = [b"" if i in self.ends else token for i, token in enumerate(tokens)]
        self.completions = lru_cache(maxsize=1000)(self._completions)

    def bytes_of(self, token: int) -> bytes:
        """What a token writes; none if it ends the text or is past the vocabulary."""
        return self.tokens[token] if token < len(self.tokens) else b""

    @cached_property
    def grammars(self) -> "Grammars":
        """What keeps a text in a given form. The library behind it is loaded here."""
        from tgen.generation.constrained import Grammars

        return Grammars(self.tokens, self.ends, self.encode)

    def _completions(self, text: bytes) -> "Completions":
        return Completions(text, self.tokens)


class Completions:
    """Which tokens would complete a string, looked for in all of them once."""

    def __init__(self, text: bytes, tokens: Sequence[bytes]) -> None:
        self._text = text
        self._inside = self._where([text in token for token in tokens])
        # What begins with the rest of the string, for every way to begin it before the token.
        self._rest = {
            n: self._where([token.startswith(text[n:]) for token in tokens])
            for n in range(1, len(text))
        }

    def after(self, written: bytes) -> NDArray[np.int64]:
        """The tokens that, put behind `written`, complete the string."""
        found = [self._inside]
        found += [ids for n, ids in self._rest.items() if written.endswith(self._text[:n])]
        return np.unique(np.concatenate(found))

    @staticmethod
    def _where(holds: list[bool]) -> NDArray[np.int64]:
        return np.flatnonzero(holds)
