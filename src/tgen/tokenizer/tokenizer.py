"""Bytes -> ids -> the same bytes, for any bytes.

All 256 bytes are in every vocabulary: no text is unknown, and bytes that are not valid UTF-8 become
byte tokens. Some tokenizers put a space before a text. It is part of the first token but not of the
text: a continuation has none, and decoding a whole text removes it.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tgen.tokenizer.allowlist import parse_json
from tgen.tokenizer.backend import Backend, make_backends
from tgen.tokenizer.byte_alphabet import spell_tokens
from tgen.tokenizer.chunking import cut_pattern, split_blocks
from tgen.tokenizer.spec import parse_spec

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
_MAX_BLOCKS = 4  # encoded at once, by a thread each; the library uses 100 times their bytes
_INVALID_UTF8 = re.compile("([\udc80-\udcff]+)")  # bytes as decoded with surrogateescape


class Tokenizer:
    """A conversion of bytes into ids and back.

    `json` is its tokenizer.json and `spec` the checked content; `bos_ids` are the ids that the
    model was trained to see before a text; `added_tokens` are the ids of tokens matched verbatim,
    of which the special ones have no bytes.
    """

    def __init__(self, json_text: str, *, end_ids: Sequence[int] = ()) -> None:
        """`end_ids` are a model's end-of-text tokens, for files that do not name them as tgen does.

        Raises TokenizerError if `json_text` is not a tokenizer that tgen supports.
        """
        self.json = json_text
        self.spec = spec = parse_spec(parse_json(json_text))
        self._plain, self._with_special = make_backends(spec)
        self._cut = cut_pattern(spec)
        vocab = spec.vocab | {token.content: token.id for token in spec.added_tokens}
        self.vocab_size = max(vocab.values()) + 1
        self._bytes, self._byte_ids = spell_tokens(spec, self.vocab_size)
        self.bos_ids = spec.bos_ids
        self.added_tokens = {token.content: token.id for token in spec.added_tokens}
        special = {token.id for token in spec.added_tokens if token.special}
        named, known = vocab.get(END_OF_TEXT), [i for i in end_ids if i in special]
        self.end_of_text = named if not known or named in known else known[0]
        self.pad = vocab.get(PAD)

    def encode(self, data: bytes, *, continuation: bool = False) -> list[int]:
        """Return the ids of a text, or with `continuation` of the rest of one.

        Special tokens spelled out in the text remain text.
        """
        ids: list[int] = self.encode_array(data, continuation=continuation).tolist()
        return ids

    def encode_prompt(self, data: bytes) -> list[int]:
        """Encode a text after `bos_ids`. An empty prompt is the start of a document: `bos_ids`, or
        without them an end-of-text token."""
        ids = [*self.bos_ids, *self.encode(data)]
        return ids or ([] if self.end_of_text is None else [self.end_of_text])

    def encode_array(self, data: bytes, *, continuation: bool = False) -> NDArray[np.uint32]:
        """Like `encode`, as an array (n,) uint32, which uses less memory for a corpus."""
        text = data.decode("utf-8", errors="surrogateescape")
        arrays = [np.zeros(0, np.uint32)]
        for i, part in enumerate(_INVALID_UTF8.split(text)):
            if i % 2:
                arrays.append(np.array(self._encode_invalid(part), np.uint32))
            else:
                arrays += self._encode_valid(part, at_start=i == 0 and not continuation)
        return np.concatenate(arrays)

    def decode(self, ids: Iterable[int], *, continuation: bool = False) -> bytes:
        """Return the bytes of a text, or with `continuation` of the rest of one.

        Special tokens have no bytes.
        """
        text = b"".join(map(self.token_bytes, ids))
        return text.removeprefix(b" ") if self.spec.prefix and not continuation else text

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes of a token, which may be part of a character.

        Ids past the vocabulary, with which models round up its size, have no bytes.
        """
        return self._bytes[i] if i < self.vocab_size else b""

    @cached_property
    def merge_pairs(self) -> NDArray[np.int64]:
        """(V, 2): the two tokens that each was merged from; -1 for characters and other tokens."""
        vocab, pairs = self.spec.vocab, np.full((self.vocab_size, 2), -1, np.int64)
        for names in reversed(self.spec.merges):  # with the same result, the first merge counts
            left, right, merged = (vocab[name] for name in (*names, "".join(names)))
            spelled = self._bytes[merged]  # b"" for special tokens
            n_characters = sum(byte & 0xC0 != 0x80 for byte in spelled)
            if n_characters > 1 and spelled == self._bytes[left] + self._bytes[right]:
                pairs[merged] = left, right
        return pairs

    def id_to_token(self, i: int) -> str | None:
        """Return a token as the vocabulary writes it; None if the id has none."""
        name: str | None = self._plain.at_start.id_to_token(i)
        return name

    def encode_with_special(self, text: str) -> list[tuple[int, int, int]]:
        """Encode a text in which special tokens count: each id with its start and end in `text`,
        in characters."""
        spans: list[tuple[int, int, int]] = []
        offset = 0
        for n, part in enumerate(_INVALID_UTF8.split(text)):
            if n % 2:
                spans += [
                    (i, offset + k, offset + k + 1)
                    for k, i in enumerate(self._encode_invalid(part))
                ]
            elif part:
                pair = self._with_special
                backend = pair.continuation if offset else pair.at_start
                encoding = backend.encode(part, add_special_tokens=False)
                offsets = zip(encoding.ids, encoding.offsets, strict=True)
                spans += [(i, offset + start, offset + end) for i, (start, end) in offsets]
            offset += len(part)
        return spans

    def _encode_invalid(self, text: str) -> list[int]:
        return [self._byte_ids[ord(character) - 0xDC00] for character in text]

    def _encode_valid(self, text: str, *, at_start: bool) -> list[NDArray[np.uint32]]:
        chunks = list(split_blocks(text, self._cut))
        n_first = 1 if at_start and self.spec.prefix else 0
        first = _encode_chunks(self._plain.at_start, chunks[:n_first])
        return first + _encode_chunks(self._plain.continuation, chunks[n_first:])


def _encode_chunks(backend: Backend, chunks: list[str]) -> list[NDArray[np.uint32]]:
    arrays = []
    for start in range(0, len(chunks), _MAX_BLOCKS):
        batch = chunks[start : start + _MAX_BLOCKS]
        encodings = backend.encode_batch_fast(batch, add_special_tokens=False)
        arrays += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        del encodings  # before the next ones are made
    return arrays
