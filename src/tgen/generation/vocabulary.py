"""The vocabulary as the loop needs it: the bytes of each token, and the end tokens."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig, raw
from tgen.config.sampling import Text
from tgen.generation.words import KnownWords, WordTokens, split_words, starts_in_word

if TYPE_CHECKING:
    from tgen.generation.constrained import Grammars

_MAX_PIECES = 1 << 14  # tokens whose bytes are stored
_MAX_WORD_TEXTS = 8  # whose words are stored


class Vocabulary:
    """The bytes of tokens by id; without them, texts are ids only and have no strings.

    `encode` returns the ids of bytes inside a text; only required strings and constraints use it.
    `unused` are the ids without a token, besides those past `tokens`, with which models round up
    their size: none is ever sampled.
    """

    def __init__(
        self,
        tokens: Sequence[bytes] = (),
        ends: Collection[int] = (),
        encode: Callable[[bytes], Sequence[int]] = list,
        unused: Collection[int] = (),
    ) -> None:
        self._unused = frozenset(unused)
        self._impossible = lru_cache(maxsize=4)(self._find_impossible)
        self.ends, self.encode = frozenset(ends), lru_cache(maxsize=1000)(encode)
        self._tokens = tokens
        self.bytes_of = lru_cache(maxsize=_MAX_PIECES)(self._bytes_of)
        self.completions = lru_cache(maxsize=1000)(self._completions)
        self._known_words = lru_cache(maxsize=_MAX_WORD_TEXTS)(self._find_words)

    @property
    def size(self) -> int:
        """Number of tokens; a number above all ids for a vocabulary without bytes."""
        return len(self._tokens) or 1 << 63

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none for end tokens and ids past the vocabulary."""
        known = token < len(self._tokens) and token not in self.ends
        return self._tokens[token] if known else b""

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of all tokens by id; none for end tokens."""
        return [b"" if i in self.ends else token for i, token in enumerate(self._tokens)]

    def has_all(self, size: int) -> bool:
        """Return whether each of `size` ids has a token."""
        return not len(self._impossible(size))

    def only_tokens(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Make ids without a token impossible in logits (N, V), in place; return the logits."""
        impossible = self._impossible(logits.shape[1])
        if len(impossible):
            logits[:, impossible] = -np.inf
        return logits

    def _find_impossible(self, size: int) -> NDArray[np.int64]:
        past = range(len(self._tokens), size) if self._tokens else range(0)
        ids = [i for i in (*self._unused, *past) if i not in self.ends]
        return np.array(sorted(ids), np.int64)

    def _completions(self, string: bytes) -> "Completions":
        return Completions(string, self._index)

    def known_words(self, sampling: SamplingConfig) -> KnownWords | None:
        """Return the words that a text may have, None for any; raises UsageError if there are none.

        Words of required strings are known, words with a banned string are not.
        """
        if sampling.words is None:
            return None
        return self._known_words(raw(sampling.words), sampling.require, sampling.ban)

    def _find_words(self, text: bytes, require: Sequence[Text], ban: Sequence[Text]) -> KnownWords:
        words, banned = split_words(text), [*map(raw, ban)]
        words = {word for word in words if not any(one in word for one in banned)}
        return KnownWords(words.union(*map(split_words, map(raw, require))), self._word_tokens)

    @cached_property
    def inner_tokens(self) -> NDArray[np.int64]:
        """Ids of the tokens that may continue a word or a character."""
        inner = (starts_in_word(token) or b"\x80" <= token[:1] < b"\xc0" for token in self.tokens)
        return np.flatnonzero([*inner])

    @cached_property
    def _word_tokens(self) -> WordTokens:
        return WordTokens.of(self.tokens)

    @cached_property
    def _index(self) -> "TokenIndex":
        return TokenIndex(self.tokens)

    @cached_property
    def grammars(self) -> "Grammars":
        """The grammar compiler for constrained generation; imports llguidance."""
        from tgen.generation.constrained import Grammars

        return Grammars(self.tokens, self.ends, self.encode)


class TokenIndex:
    """Tokens in the order of their bytes."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        self._ids, self._sorted = np.array(order, np.int64), [tokens[i] for i in order]
        self.max_length = max(map(len, tokens), default=0)  # bytes

    def containing(self, string: bytes) -> NDArray[np.int64]:
        """Return the ids of tokens that contain a string, in ascending order."""
        if len(string) > self.max_length:
            return np.zeros(0, np.int64)
        return np.flatnonzero([string in token for token in self._tokens])

    def starting_with(self, string: bytes) -> NDArray[np.int64]:
        """Return the ids of tokens that start with a string."""
        start = bisect_left(self._sorted, string)
        end = bisect_right(self._sorted, string, start, key=lambda token: token[: len(string)])
        return self._ids[start:end]


class Completions:
    """An index of the tokens that can complete a string."""

    def __init__(self, string: bytes, index: TokenIndex) -> None:
        self.containing = index.containing(string)
        # The first bytes of the string, and the tokens that start with all others.
        self._finishing: list[tuple[bytes, NDArray[np.int64]]] = []
        for n in range(max(1, len(string) - index.max_length), len(string)):
            ids = index.starting_with(string[n:])
            if len(ids):
                self._finishing.append((string[:n], ids))

    def after(self, text: bytes) -> NDArray[np.int64]:
        """Return the tokens that, appended to `text`, complete the string."""
        ids = [self.containing]
        ids += [rest for start, rest in self._finishing if text.endswith(start)]
        return np.unique(np.concatenate(ids))
