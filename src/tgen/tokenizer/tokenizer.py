"""Bytes -> ids -> the same bytes, whatever the bytes are.

All 256 bytes are in every vocabulary: nothing is ever unknown, and bytes that are no valid UTF-8
become their byte tokens. Some kinds put a space before a text. It is part of the first token, but
not of the text: what continues a text has none, and decoding a whole text takes it away again.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tgen.tokenizer.allowlist import read
from tgen.tokenizer.backend import Backend, make_backends
from tgen.tokenizer.byte_alphabet import BYTE_CHARACTERS, BYTE_TOKENS, byte_level, sentencepiece
from tgen.tokenizer.chunking import blocks, where_to_cut
from tgen.tokenizer.spec import TokenizerSpec, check

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
_AT_ONCE = 4  # blocks of a text, a thread each; the library takes a hundred times their bytes
_STRAY = re.compile("([\udc80-\udcff]+)")  # how surrogateescape shows bytes that are no UTF-8


class Tokenizer:
    """Turns bytes into ids and back. `json` is the tokenizer.json it came from and `layout` what it
    says; `start` are the ids that the model was trained to see before a text."""

    def __init__(self, json_text: str, *, ends: Sequence[int] = ()) -> None:
        """`ends` are what a model says of the tokens that end its texts: from elsewhere they may
        have another name than ours. Raises TokenizerError if `json_text` is not a tokenizer of a
        kind that tgen reads.
        """
        self.json = json_text
        self.layout = layout = check(read(json_text))
        self._first, self._inner = make_backends(layout)
        self._cut, self._prefixed = where_to_cut(layout), bool(layout.prefix)
        vocab = layout.vocab | {token.content: token.id for token in layout.added}
        special = {token.content: token.id for token in layout.added if token.special}
        self.vocab_size = max(vocab.values()) + 1
        self._bytes, self._byte_ids = _spelled(layout, self.vocab_size)
        self.start = layout.start
        # Tokens that are found in text as they are written; special ones have no bytes.
        self.added = {token.content: token.id for token in layout.added}
        self.anew = layout.prefix == "always"  # a text begins anew after each of them
        ours = vocab.get(END_OF_TEXT)
        known = [i for i in ends if i in special.values()]
        self.end_of_text = ours if not known or ours in known else known[0]
        self.pad = vocab.get(PAD)

    def encode(self, data: bytes, *, continues: bool = False) -> list[int]:
        """The ids of any bytes, which are a text or, with `continues`, come after others in one.

        Special tokens written out in the text stay plain text.
        """
        ids: list[int] = self.encode_array(data, continues=continues).tolist()
        return ids

    def encode_prompt(self, data: bytes) -> list[int]:
        """As `encode`, after what the model was trained to see before a text. An empty prompt
        begins where documents begin: there, or else after an end-of-text token."""
        ids = [*self.start, *self.encode(data)]
        return ids or ([] if self.end_of_text is None else [self.end_of_text])

    def encode_array(self, data: bytes, *, continues: bool = False) -> NDArray[np.uint32]:
        """As `encode`, as an array (n,) uint32: a corpus has too many ids for a list."""
        text = data.decode("utf-8", errors="surrogateescape")
        parts = [np.zeros(0, np.uint32)]
        start = 0
        for stray in _STRAY.finditer(text):
            parts += self._encode_text(text[start : stray.start()], begins=not (start or continues))
            ids = [self._byte_ids[ord(c) - 0xDC00] for c in stray.group()]
            parts.append(np.array(ids, np.uint32))
            start = stray.end()
        parts += self._encode_text(text[start:], begins=not (start or continues))
        return np.concatenate(parts)

    def decode(self, ids: Iterable[int], *, continues: bool = False) -> bytes:
        """The bytes of a whole text or, with `continues`, of what comes after others in one.

        Special tokens have none.
        """
        text = b"".join(map(self.token_bytes, ids))
        return text.removeprefix(b" ") if self._prefixed and not continues else text

    def token_bytes(self, i: int) -> bytes:
        """The bytes that one token stands for: perhaps only a part of a character.

        None for ids past the vocabulary, which some models have to round their sizes up.
        """
        return self._bytes[i] if i < self.vocab_size else b""

    @cached_property
    def merge_pairs(self) -> NDArray[np.int64]:
        """(V, 2): the two tokens that each was merged from; -1 for those that were not, and for
        single characters."""
        vocab, found = self.layout.vocab, np.full((self.vocab_size, 2), -1, np.int64)
        for names in reversed(self.layout.merges):  # where two make the same token the first counts
            left, right, whole = (vocab[name] for name in (*names, "".join(names)))
            made = self._bytes[whole]  # b"" for special tokens, which are not text
            if _n_characters(made) > 1 and made == self._bytes[left] + self._bytes[right]:
                found[whole] = left, right
        return found

    def id_to_token(self, i: int) -> str | None:
        """How the tokenizer itself writes a token; None if there is none."""
        name: str | None = self._first.id_to_token(i)
        return name

    def encode_with_added(self, text: str) -> list[tuple[int, int, int]]:
        """As `encode`, but special tokens count: each id, and where it begins and ends in `text`,
        in characters."""
        found: list[tuple[int, int, int]] = []
        at = 0
        for n, part in enumerate(_STRAY.split(text)):
            if n % 2:
                strays = (self._byte_ids[ord(c) - 0xDC00] for c in part)
                found += [(i, at + k, at + k + 1) for k, i in enumerate(strays)]
            elif part:
                backend = self._inner if at else self._first
                backend.encode_special_tokens = False
                e = backend.encode(part, add_special_tokens=False)
                backend.encode_special_tokens = True
                places = zip(e.ids, e.offsets, strict=True)
                found += [(i, at + begin, at + end) for i, (begin, end) in places]
            at += len(part)
        return found

    def _encode_text(self, text: str, *, begins: bool) -> list[NDArray[np.uint32]]:
        """Of valid UTF-8; `begins` where it is the beginning of a text."""
        parts = list(blocks(text, self._cut))
        n_first = 1 if begins and self._prefixed else 0
        return _encode(self._first, parts[:n_first]) + _encode(self._inner, parts[n_first:])


def _encode(backend: Backend, texts: list[str]) -> list[NDArray[np.uint32]]:
    found = []
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        encodings = backend.encode_batch_fast(some, add_special_tokens=False)
        found += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        del encodings  # or they are there beside the next ones
    return found


def _spelled(layout: TokenizerSpec, size: int) -> tuple[list[bytes], list[int]]:
    """What each id stands for, and each byte's id."""
    spell, bytes_names = (
        (byte_level, BYTE_CHARACTERS) if layout.byte_level else (sentencepiece, BYTE_TOKENS)
    )
    spelled = [b""] * size
    for token, i in layout.vocab.items():
        spelled[i] = spell(token)
    byte_ids = [layout.vocab[name] for name in bytes_names]
    for byte, i in enumerate(byte_ids):
        spelled[i] = bytes([byte])
    for added in layout.added:  # found in the text as they are written
        spelled[added.id] = b"" if added.special else added.content.encode()
    return spelled, byte_ids


def _n_characters(data: bytes) -> int:
    """Of UTF-8 that may lack a character's beginning: that is none."""
    return sum(byte & 0xC0 != 0x80 for byte in data)
