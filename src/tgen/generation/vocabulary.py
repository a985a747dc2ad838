"""The vocabulary as the loop needs it: the bytes of each token, and the end tokens."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tgen.generation.constrained import Grammars


class Vocabulary:
    """The bytes of tokens by id; without them, texts are ids only and have no strings.

    `encode` returns the ids of bytes inside a text; only required strings and constraints use it.
    """

    def __init__(
        self,
        tokens: Sequence[bytes] = (),
        ends: Collection[int] = (),
        encode: Callable[[bytes], Sequence[int]] = list,
    ) -> None:
        self.ends, self.encode = frozenset(ends), lru_cache(maxsize=1000)(encode)
        self.tokens = [b"" if i in self.ends else token for i, token in enumerate(tokens)]
        self.completions = lru_cache(maxsize=1000)(partial(Completions, tokens=self.tokens))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none for end tokens and ids past the vocabulary."""
        return self.tokens[token] if token < len(self.tokens) else b""

    @cached_property
    def grammars(self) -> "Grammars":
        """The grammar compiler for constrained generation; imports llguidance."""
        from tgen.generation.constrained import Grammars

        return Grammars(self.tokens, self.ends, self.encode)


class Completions:
    """An index of the tokens that can complete a string."""

    def __init__(self, string: bytes, tokens: Sequence[bytes]) -> None:
        self._string = string
        self._containing = np.flatnonzero([string in token for token in tokens])
        # Tokens that start with the rest of the string, for each n bytes of it before the token.
        self._finishing = {
            n: np.flatnonzero([token.startswith(string[n:]) for token in tokens])
            for n in range(1, len(string))
        }

    def after(self, text: bytes) -> NDArray[np.int64]:
        """Return the tokens that, appended to `text`, complete the string."""
        ids = [self._containing]
        ids += [rest for n, rest in self._finishing.items() if text.endswith(self._string[:n])]
        return np.unique(np.concatenate(ids))
