"""Words: where they begin and end, and the constraint that a text spells only known ones.

A word is a maximal run of letters, digits, marks and apostrophes (' and ’); all other characters
separate words, and so do those of scripts that write no spaces. Words are compared byte by byte,
upper and lower case are different.
"""

import codecs
import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.engine.base import Logits
from tgen.errors import UsageError

MAX_WORD_BYTES = 200  # longer words of a text are unknown
TAIL_BYTES = MAX_WORD_BYTES + 4  # of a text: enough for its last word
_UNSPACED = (  # Thai, Lao; Myanmar; Khmer; kana and Han, with their extensions
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x9FFF)),
    *((0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x20000, 0x3FFFF)),
)
_MAX_MASK_BYTES = 16 << 20  # of the cached masks of one text's words


@lru_cache(maxsize=1 << 16)
def is_word_character(character: str) -> bool:
    """Return whether a character belongs to words."""
    if any(first <= ord(character) <= last for first, last in _UNSPACED):
        return False
    is_mark = unicodedata.category(character).startswith("M")
    return character.isalnum() or character in "'’" or is_mark


def split_words(text: bytes) -> set[bytes]:
    """Return the words of a text; bytes that are not UTF-8 separate them."""
    words: set[bytes] = set()
    characters = text.decode("utf-8", "surrogateescape")
    separators = {ord(one): " " for one in set(characters) if not is_word_character(one)}
    for line in characters.splitlines():  # not the whole text, whose list of words may be large
        words.update(map(str.encode, line.translate(separators).split()))
    return words


def last_word(text: bytes) -> bytes:
    """Return the part of a word at the end of a text, and an incomplete character after it."""
    characters, n = codecs.utf_8_decode(text[-TAIL_BYTES:], "surrogateescape", False)
    start = len(characters)
    while start and is_word_character(characters[start - 1]):
        start -= 1
    return characters[start:].encode() + text[-TAIL_BYTES:][n:]


def starts_in_word(text: bytes) -> bool:
    """Return whether the first character of a text belongs to a word, or may do so if it is
    incomplete."""
    characters, _ = codecs.utf_8_decode(text[:4], "surrogateescape", False)
    return bool(text) and (not characters or is_word_character(characters[0]))


def find_borders(string: bytes, text: bytes, start: int) -> Iterator[bool]:
    """Yield for each occurrence of a string from `start` on that cuts no word whether its end is
    certain: a string that ends in a word may be followed by more of it at the end of a text."""
    starts, ends = starts_in_word(string), bool(last_word(string))
    at = text.find(string, start)
    while at >= 0:
        rest = text[at + len(string) : at + len(string) + 4]
        before = text[max(0, at - 4) : at]
        if not (starts and last_word(before)) and not (ends and starts_in_word(rest)):
            yield bool(rest) or not ends
        at = text.find(string, at + 1)


class Ending(NamedTuple):
    """A token that ends a word."""

    id: int
    words: list[bytes]  # after this word
    tail: bytes  # part of a word at the end of the token


class WordTokens(NamedTuple):
    """A vocabulary by the parts of words that its tokens start with.

    Tokens inside a word are in `inner`, by their bytes. Those that end a word are in `ending`, by
    their bytes before its end. `continuing` tokens start inside a character.
    """

    tokens: Sequence[bytes]
    inner: dict[bytes, list[int]]
    ending: dict[bytes, list[Ending]]
    continuing: list[int]

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> "WordTokens":
        """Sort the tokens of a vocabulary; those that no valid text has are in no part."""
        inner: dict[bytes, list[int]] = {}
        ending: dict[bytes, list[Ending]] = {}
        continuing = []
        for i, token in enumerate(tokens):
            if token and token[0] & 0xC0 == 0x80:
                continuing.append(i)
            elif token and (parts := _split(token)) is not None:
                *words, tail = parts
                if words:
                    ending.setdefault(words[0], []).append(Ending(i, words[1:], tail))
                    continue
                inner.setdefault(token, []).append(i)
                word, character = _cut_character(tail)
                if character and _starts_separator(character):
                    ending.setdefault(word, []).append(Ending(i, [], character))
        return cls(tokens, inner, ending, continuing)


def _cut_character(text: bytes) -> tuple[bytes, bytes]:
    """Cut off an incomplete character at the end."""
    n = codecs.utf_8_decode(text, "surrogateescape", False)[1]
    return text[:n], text[n:]


def _split(text: bytes) -> list[bytes] | None:
    """Return the words of a text that may start inside the first and end inside the last, which
    are empty if it does not; the last has an incomplete character. None: not UTF-8."""
    try:
        characters, n = codecs.utf_8_decode(text, "strict", False)
    except UnicodeDecodeError:
        return None
    word, words = "", []
    for i, character in enumerate(characters):
        if is_word_character(character):
            word += character
        elif word or not i:
            words.append(word.encode())
            word = ""
    return [*words, word.encode() + text[n:]]


@lru_cache(maxsize=1 << 12)
def _starts_separator(part: bytes) -> bool:
    """Return whether an incomplete character may become one that separates words."""
    n_missing = (2 if part[0] < 0xE0 else 3 if part[0] < 0xF0 else 4) - len(part)
    first = part[0] & (0x1F, 0x0F, 0x07)[len(part) + n_missing - 2]
    for byte in part[1:]:
        first = first << 6 | byte & 0x3F
    candidates = range(first << 6 * n_missing, min(first + 1 << 6 * n_missing, 0x110000))
    return any(
        chr(i).encode("utf-8", "ignore").startswith(part) and not is_word_character(chr(i))
        for i in candidates
    )


class KnownWords:
    """The constraint that a text spells only known words; separators are free.

    The state of a text is its last word, see `last_word`. If no known word starts with it, because
    a prompt ends so, the constraint starts at the next separator.
    """

    def __init__(self, words: Collection[bytes], tokens: WordTokens) -> None:
        """Raises UsageError if the vocabulary spells none of the words."""
        self._tokens = tokens
        self._known = {word for word in words if len(word) <= MAX_WORD_BYTES}
        self._sorted = sorted(self._known)
        self._parts = self._find_parts()
        if not self._starts_word(b""):
            message = "words: the tokenizer can spell no word of the text"
            raise UsageError(message, "name another text", field="words")
        self.longest = max(map(len, self._sorted))  # bytes
        self._ending = {  # of the tokens that end a word, those that may be in a text
            word: np.array([one.id for one in parts if self._is_possible(one)], np.int64)
            for word, parts in tokens.ending.items()
        }
        ending = [(word, one) for word, parts in tokens.ending.items() for one in parts]
        crossing = [one.id for word, one in ending if word and one.tail]
        self.crossing = np.array(crossing, np.int64)  # tokens that end a word and begin another
        n_masks = max(16, 8 * _MAX_MASK_BYTES // max(1, len(tokens.tokens)))
        self._forbidden = lru_cache(maxsize=n_masks)(self._find_forbidden)

    def apply(self, logits: Logits, text: bytes, ends: Sequence[int]) -> None:
        """Make the tokens (V,) impossible that cannot follow a text; tokens of `ends` may follow a
        whole word."""
        bits, is_whole = self._forbidden(last_word(text))
        end_logits = logits[ends]
        n = min(len(self._tokens.tokens), len(logits))
        logits[:n][np.unpackbits(bits, count=n).view(bool)] = -np.inf
        logits[ends] = end_logits if is_whole else -np.inf

    def _find_forbidden(self, word: bytes) -> tuple[NDArray[np.uint8], bool]:
        """Return a bit per token, set if it cannot follow a text with this last word, and whether
        the text may end."""
        tokens, forbidden = self._tokens, np.ones(len(self._tokens.tokens), bool)
        start, character = _cut_character(word)
        is_whole = not character and (not start or start in self._known)
        if not self._is_part(word):  # of a prompt
            is_whole = not character
            forbidden[tokens.continuing] = is_whole
            for ids in tokens.inner.values():
                forbidden[ids] = not is_whole
            for possible in self._ending.values():
                forbidden[possible] = not is_whole
        elif character:
            followers = [i for i in tokens.continuing if self._may_follow(word, tokens.tokens[i])]
            forbidden[followers] = False
        else:
            if is_whole and b"" in self._ending:
                forbidden[self._ending[b""]] = False
            for part in self._find_next_parts(word):
                if part in tokens.inner and self._starts_word(word + part):
                    forbidden[tokens.inner[part]] = False
                if part in self._ending and word + part in self._known:
                    forbidden[self._ending[part]] = False
        return np.packbits(forbidden), is_whole

    def _is_possible(self, ending: Ending) -> bool:
        """Return whether the rest of a token that ends a word may be in a text."""
        return self._known.issuperset(ending.words) and self._is_part(ending.tail)

    def _may_follow(self, word: bytes, token: bytes) -> bool:
        """Return whether a token that starts inside a character may follow a word's part."""
        if (parts := _split(word + token)) is None:
            return False
        *words, tail = parts
        return self._known.issuperset(filter(None, words)) and self._is_part(tail)

    def _is_part(self, word: bytes) -> bool:
        """Return whether a text may end inside this word, which may lack part of a character."""
        if self._starts_word(word):
            return True
        start, character = _cut_character(word)
        is_whole = not start or start in self._known
        return bool(character) and is_whole and _starts_separator(character)

    def _starts_word(self, word: bytes) -> bool:
        """Return whether a known word starts so, and tokens can complete it."""
        if self._parts is not None:
            return word in self._parts
        at = bisect_left(self._sorted, word)
        return at < len(self._sorted) and self._sorted[at].startswith(word)

    def _find_next_parts(self, word: bytes) -> set[bytes]:
        """Return the parts of words that may follow a part: those of all known words that start
        with it, or if these are many, those of all tokens."""
        start, end = (bisect_left(self._sorted, text) for text in (word, word + b"\xff"))
        tokens = self._tokens
        if end - start > len(tokens.inner) + len(tokens.ending):
            return {*tokens.inner, *tokens.ending} - {b""}
        rests = [known[len(word) :] for known in self._sorted[start:end]]
        return {rest[:n] for rest in rests for n in range(1, len(rest) + 1)}

    def _find_parts(self) -> set[bytes] | None:
        """Return the starts of known words that tokens can complete; None: all of them, since the
        vocabulary has all their bytes."""
        tokens = self._tokens
        single = {token[0] for token in tokens.tokens if len(token) == 1}
        if all(single.issuperset(word) for word in self._known):
            return None
        found: set[bytes] = set()
        for word in self._known:
            lengths = {len(word)}
            for n in range(len(word) - 1, -1, -1):
                nexts = (m for m in range(n + 1, len(word) + 1) if word[n:m] in tokens.inner)
                in_character = word[n] & 0xC0 == 0x80  # the other tokens are in `continuing`
                if in_character or word[n:] in tokens.ending or not lengths.isdisjoint(nexts):
                    lengths.add(n)
            found.update(word[:n] for n in lengths)
        return found
