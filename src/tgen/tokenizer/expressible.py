"""Find the characters of a text that a vocabulary cannot express.

Some vocabularies lack the tokens of bytes that were not in their training text, and openai-gpt's
has no byte tokens at all. The tokenizers library drops such a byte or character silently.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tgen.tokenizer.tokenizer_json import SPACE, TokenizerSpec

REPLACEMENT = "\ufffd"
_INVALID_BYTE = re.compile("[\udc80-\udcff]")  # as decoded with surrogateescape
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


class Hole(NamedTuple):
    """A character, or a byte of invalid UTF-8, that no tokens express."""

    start: int  # in characters; to `end` with the marks that belong to it
    end: int
    byte: int  # the first of its bytes without a token
    offset: int  # position of that byte in the text


class ExpressibleText:
    """The texts that a vocabulary can express; a text is UTF-8 decoded with surrogateescape."""

    def __init__(
        self,
        spec: TokenizerSpec,
        byte_ids: Sequence[int | None],
        normalize: Callable[[str], str] | None,
    ) -> None:
        self._spec, self._normalize = spec, normalize
        self._bytes = {byte for byte, i in enumerate(byte_ids) if i is not None}
        self._complete = len(self._bytes) == 256
        self._valid_complete = self._bytes | _NEVER_IN_UTF8 == set(range(256))
        self._known: dict[str, bool] = {}  # by character, after normalization
        self._removed: dict[str, bool] = {}  # by character, before it
        # Added tokens are matched verbatim, whatever their characters are.
        names = [t for t in spec.added_tokens if not self._expresses(t.content)]
        self._verbatim = [token.content for token in names if not token.special]
        self._with_special = [token.content for token in names]

    def holes(self, text: str, *, with_special: bool = False) -> Iterator[Hole]:
        """Yield what the vocabulary cannot express, in order.

        `with_special` says that special tokens spelled out in the text are tokens.
        """
        if self._spec.word_level:  # words are looked up as a whole
            return
        if self._complete or (self._valid_complete and not _INVALID_BYTE.search(text)):
            return
        if self._expresses(text):
            return
        verbatim = self._with_special if with_special else self._verbatim
        names = [name for name in verbatim if name in text]
        tokens = re.finditer(any_of(names), text) if names else iter(())
        token = next(tokens, None)
        offset = last = 0
        for start, end in self._candidates(text):
            while token and token.end() <= start:
                token = next(tokens, None)
            if (token and token.start() <= start) or self._expresses(text[start:end]):
                continue
            offset += len(text[last:start].encode(errors="surrogateescape"))
            last = start
            data = text[start:end].encode(errors="surrogateescape")
            first = next((i for i, b in enumerate(data) if b not in self._bytes), 0)
            yield Hole(start, end, data[first], offset + first)

    def replace_holes(self, text: str) -> tuple[str, int]:
        """Return the text with U+FFFD in place of each hole, and their number."""
        parts, start, n = [], 0, 0
        for hole in self.holes(text):
            parts += [text[start : hole.start], REPLACEMENT]
            start, n = hole.end, n + 1
        return ("".join([*parts, text[start:]]) if n else text), n

    def _expresses(self, text: str) -> bool:
        characters = set(text)
        if self._normalize:
            if "BertNormalizer" in self._spec.normalizers and self._removes_any(characters):
                return False
            bytes_ = {c for c in characters if _INVALID_BYTE.match(c)}
            characters = {*self._normalize(_INVALID_BYTE.sub(" ", text)), *bytes_}
        for character in characters:
            if character not in self._known:
                self._known[character] = self._has_tokens(character)
        return all(map(self._known.__getitem__, characters))

    def _removes_any(self, characters: set[str]) -> bool:
        """Return whether normalization removes one of the characters; accents do not count."""
        assert self._normalize
        for c in characters:
            if c not in self._removed:
                is_text = not _INVALID_BYTE.match(c) and not unicodedata.category(c).startswith("M")
                self._removed[c] = is_text and not self._normalize(c)
        return any(map(self._removed.__getitem__, characters))

    def _has_tokens(self, character: str) -> bool:
        vocab, word_end = self._spec.vocab, self._spec.word_end
        if word_end:
            is_known = character in vocab and character + word_end in vocab
            return is_known or character.isspace()  # whitespace only separates words
        if not self._spec.byte_level and character.replace(" ", SPACE) in vocab:
            return True
        return self._bytes.issuperset(character.encode(errors="surrogateescape"))

    def _candidates(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each character that may be a hole; if a normalizer decides, of
        every character with the marks that may be joined to it."""
        if self._normalize is None or self._valid_complete:
            if holes := re.escape("".join(c for c in set(text) if not self._expresses(c))):
                yield from (match.span() for match in re.finditer(f"[{holes}]", text))
            return
        start = 0
        for end in range(1, len(text) + 1):
            if end == len(text) or not _is_joined(text[end]):
                yield start, end
                start = end


def _is_joined(character: str) -> bool:
    """Return whether normalization may join a character to the one before it."""
    return unicodedata.combining(character) > 0 or "\u1160" <= character <= "\u11ff"


def any_of(names: Iterable[str]) -> str:
    """Return a pattern that matches the longest of the names; without names it matches nothing."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
