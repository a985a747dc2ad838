"""Tokenizers: bytes -> ids -> the same bytes, and a stream of tokens -> whole characters.

Bytes that are not valid UTF-8 become byte tokens. Vocabularies trained here have all 256; others
may lack some: then a prompt with such a byte is an error, and in a corpus U+FFFD replaces it. Some
tokenizers put a space before a text. It is part of the first token but not of the text: a
continuation has none, and decoding a whole text removes it.

A long text is cut into chunks with the same tokens, so that memory use is bounded. A cut must not
be inside a word. If the whole text may be one word, the vocabulary may prove that no token has a
visible character after a line break.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.errors import CorpusError, UsageError
from tgen.tokenizer.allowlist import parse_json
from tgen.tokenizer.backend import (
    Backend,
    BackendPair,
    Backends,
    MergesOfText,
    is_consistent,
    make_backends,
    make_normalizer,
    split_words,
)
from tgen.tokenizer.expressible import REPLACEMENT, ExpressibleText
from tgen.tokenizer.patterns import CUT_PATTERNS, LINE_STARTS, LLAMA3
from tgen.tokenizer.tokenizer_json import (
    BYTE_CHARACTERS,
    BYTE_TOKENS,
    SPACE,
    TokenizerSpec,
    parse_merges,
    parse_spec,
)
from tgen.tokenizer.word_ids import WordIds

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
_BLOCK = 1 << 17  # characters encoded by one thread at a time
_SMALL_BLOCK = 1 << 10  # characters of ASCII between others that are looked up by words
_MAX_BLOCKS = 4  # encoded at once, by a thread each; the library uses 100 times their bytes
_INVALID_UTF8 = re.compile("([\udc80-\udcff]+)")  # bytes as decoded with surrogateescape
_NEWLINE = BYTE_CHARACTERS[10]
_WHITE = "".join(BYTE_CHARACTERS[byte] for byte in b"\t\n\v\f\r ")
_CROSSES_LINES = {  # tokens with a visible character after a line break, by `byte_level`
    True: re.compile(f"{_NEWLINE}[^{_WHITE}]"),
    False: re.compile(rf"\n[^\s{SPACE}]|.{BYTE_TOKENS[10]}|{BYTE_TOKENS[10]}.", re.DOTALL),
}
_AFTER_LINE = re.compile(r"\n\S")


class Tokenizer:
    """A conversion of bytes into ids and back.

    `spec` is the checked content of its tokenizer.json; `bos_ids` are the ids that the model was
    trained to see before a text; `added_tokens` are the ids of tokens matched verbatim, of which
    the special ones have no bytes. `vocab_size` is the number of ids that the model has.
    """

    def __init__(
        self,
        content: str | dict[str, Any],
        *,
        parse_again: Callable[[], dict[str, Any]] | None = None,
        merges_of_text: MergesOfText | None = None,
        end_ids: Sequence[int] = (),
        n_rows: int | None = None,
    ) -> None:
        """`content` is a tokenizer.json, as a text or parsed; `parse_again` returns the latter once
        more, so that it does not stay in memory. With `merges_of_text`, `content` has no merges:
        they are read when a text needs them all. `end_ids` are a model's end-of-text tokens, for
        files that do not name them as tgen does. `n_rows` is the number of a model's embeddings:
        tokens past them are an error in a text.

        Raises TokenizerError if `content` is not a tokenizer that tgen supports.
        """

        def parse() -> dict[str, Any]:
            return parse_json(content) if isinstance(content, str) else content

        self._text = content if isinstance(content, str) else None
        parsed, self._parse = parse(), parse_again or parse
        self.spec = spec = parse_spec(parsed)
        self._merges_of_text = merges_of_text
        self._all: Backends | None = None
        self._merges: list[Sequence[str]] | None = None  # until all are in the backends
        if merges_of_text is None:
            self._merges = merges = parse_merges(parsed, spec.vocab)
            if spec.byte_level and is_consistent(spec, merges):
                self._merges_of_text = MergesOfText(spec.vocab, lambda: merges)
            else:
                self._make_all()
        self._cut, self._prefix_breaks = _cut_pattern(spec), _find_prefix_breaks(spec)
        vocab = spec.vocab | {token.content: token.id for token in spec.added_tokens}
        n_tokens = max(vocab.values()) + 1
        self._has_all_ids = len(vocab) == n_tokens
        self.vocab_size = min(n_tokens, n_rows or n_tokens)
        self._bytes, self._byte_ids = spec.spell_special()  # the bytes of tokens, as far as needed
        self.expressible = ExpressibleText(spec, self._byte_ids, make_normalizer(spec))
        self._has_more_tokens = n_tokens > self.vocab_size
        self.bos_ids = spec.bos_ids
        self.added_tokens = {token.content: token.id for token in spec.added_tokens}
        special = {token.id for token in spec.added_tokens if token.special}
        named, known = vocab.get(END_OF_TEXT), [i for i in end_ids if i in special]
        end_of_text = named if not known or named in known else known[0]
        self.end_of_text, self.pad = (
            i if i is not None and i < self.vocab_size else None
            for i in (end_of_text, vocab.get(PAD))
        )

    @cached_property
    def json(self) -> str:
        """The tokenizer.json."""
        text = self._text
        return json.dumps(self._parse(), ensure_ascii=False) if text is None else text

    def _backends_for(self, text: str) -> Backends:
        """Return backends that give this text its ids: with a part of the vocabulary, or all."""
        if (backends := self._all) is not None:
            return backends
        part = self._merges_of_text
        changed = bool(self.spec.prefix) or (self.spec.normalizers and not text.isascii())
        if part and not changed and (found := part.find(text, self.added_tokens)):
            tokens, merges = found
            return make_backends(replace(self.spec, vocab=tokens), merges)
        return self._make_all()

    def _make_all(self) -> Backends:
        self._all = backends = make_backends(self.spec, self.merges())
        self._merges_of_text = self._merges = None
        return backends

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs of tokens that are merged, in their order."""
        pairs = self._merges
        if pairs is None:
            pairs = parse_merges(self._parse(), self.spec.vocab)
        return [(left, right) for left, right in pairs]

    def encode(self, data: bytes, *, continuation: bool = False, offset: int = 0) -> list[int]:
        """Return the ids of a text, or with `continuation` of the rest of one.

        Special tokens spelled out in the text remain text. Raises UsageError for a byte that the
        vocabulary cannot express, or a token that the model does not have; `offset` is the number
        of bytes before `data`, for that error.
        """
        text = data.decode("utf-8", errors="surrogateescape")
        self.check_expressible(text, offset=offset)
        ids: list[int] = self._encode(text, continuation=continuation).tolist()
        return ids

    def check_expressible(self, text: str, *, with_special: bool = False, offset: int = 0) -> None:
        """Raise UsageError for the first byte that the vocabulary cannot express.

        `with_special` says that special tokens spelled out in the text are tokens, `offset` how
        many bytes are before it.
        """
        for hole in self.expressible.holes(text, with_special=with_special):
            character = text[hole.start]
            is_part = not character.isascii() and not "\udc80" <= character <= "\udcff"
            part = f" (of the character U+{ord(character):04X})" if is_part else ""
            raise UsageError(
                f"byte {offset + hole.offset} of the text is 0x{hole.byte:02X}{part}, which this "
                "model's tokenizer cannot express",
                "remove it or replace it",
            )

    def encode_prompt(self, data: bytes) -> list[int]:
        """Encode a text after `bos_ids`. An empty prompt is the start of a document: `bos_ids`, or
        without them an end-of-text token."""
        self.check_ids(self.bos_ids)
        ids = [*self.bos_ids, *self.encode(data)]
        return ids or ([] if self.end_of_text is None else [self.end_of_text])

    def encode_corpus(
        self, data: bytes, *, continuation: bool = False
    ) -> tuple[NDArray[np.uint32], int]:
        """Return the ids (n,) of a text of a corpus, or with `continuation` of the rest of one, and
        the number of characters that U+FFFD replaces because the vocabulary cannot express them.

        Raises CorpusError if it cannot express U+FFFD either, and UsageError as `encode` does.
        """
        text, n_replaced = self._replace_holes(data)
        return self._encode(text, continuation=continuation, by_words=True), n_replaced

    def make_expressible(self, data: bytes) -> bytes:
        """Return a text in which U+FFFD replaces what the vocabulary cannot express.

        Raises CorpusError as `encode_corpus` does.
        """
        if self.spec.word_level:
            words = split_words(data.decode(errors="ignore").replace(SPACE, ""), prefix=True)
            return self.decode(self.spec.vocab[word] for word in words if word in self.spec.vocab)
        return self._replace_holes(data)[0].encode(errors="surrogateescape")

    def _replace_holes(self, data: bytes) -> tuple[str, int]:
        text = data.decode("utf-8", errors="surrogateescape")
        replaced, n = self.expressible.replace_holes(text)
        if n and any(self.expressible.holes(REPLACEMENT)):
            byte = next(self.expressible.holes(text)).byte
            raise CorpusError(
                f"the model's tokenizer can express neither 0x{byte:02X} in the corpus nor U+FFFD, "
                "which would replace it",
                "remove such characters from the corpus",
            )
        return replaced, n

    def _encode(
        self, text: str, *, continuation: bool, by_words: bool = False
    ) -> NDArray[np.uint32]:
        if self.spec.word_level:
            return np.array(list(self._word_ids(text, prefix=not continuation)), np.uint32)
        arrays, pair = [np.zeros(0, np.uint32)], self._backends_for(text).plain
        parts = [text] if text.isascii() else _INVALID_UTF8.split(text)
        for i, part in enumerate(parts):
            if i % 2:
                arrays.append(np.array(self._encode_invalid(part), np.uint32))
            elif by_words and len(part) > _SMALL_BLOCK and self._words is not None:
                arrays += self._encode_words(self._words, part)
            else:
                arrays += self._encode_valid(pair, part, at_start=i == 0 and not continuation)
        ids = np.concatenate(arrays)
        self.check_ids(ids)
        return ids

    def _word_ids(self, text: str, *, prefix: bool) -> Iterator[int]:
        """Yield the ids of words; raise UsageError for the first that the vocabulary lacks."""
        if not text:
            return
        if _INVALID_UTF8.search(text) or SPACE in text:
            reason = "U+2581" if SPACE in text else "bytes that are not UTF-8"
            raise UsageError(f"a tokenizer of words cannot encode {reason}", "remove them")
        for word in split_words(text, prefix=prefix):
            i = self.spec.vocab.get(word, self.spec.unknown)
            if i is None:
                shown = self.spec.spell(word).decode().strip() or self.spec.spell(word).decode()
                bare, where = word.removeprefix(SPACE), ""
                if bare != word and bare in self.spec.vocab:
                    where = " after a space or at the start of a text"
                elif SPACE + word in self.spec.vocab:
                    where = " without a space before it"
                raise UsageError(
                    f"the word {shown!r}{where} is not in the vocabulary of this model",
                    "use only words of the training text; spaces count; "
                    "--tokenizer word --unk trains with a token for other words",
                )
            yield i

    def check_ids(self, ids: Sequence[int] | NDArray[np.uint32]) -> None:
        """Raise UsageError for the first token that the model does not have."""
        if not self._has_more_tokens:
            return
        missing = np.asarray(ids)[np.asarray(ids) >= self.vocab_size]
        if len(missing):
            i = int(missing[0])
            raise UsageError(
                f"the text has the token {self.id_to_token(i)!r} with the id {i:,}, but the model "
                f"has only {self.vocab_size:,} tokens",
                "remove it from the text, or use the tokenizer.json of this model",
            )

    def decode(self, ids: Iterable[int], *, continuation: bool = False) -> bytes:
        """Return the bytes of a text, or with `continuation` of the rest of one.

        Special tokens have no bytes.
        """
        text = b"".join(map(self.token_bytes, ids))
        if self.spec.word_end and not continuation:
            return text.removesuffix(b" ")
        return text.removeprefix(b" ") if self.spec.prefix and not continuation else text

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes of a token, which may be part of a character.

        Ids past the vocabulary, with which models round up its size, have no bytes. Raises
        UsageError for a negative id.
        """
        if i >= self.vocab_size:
            return b""
        if (spelled := self._bytes.get(i)) is None:
            if i < 0:
                raise UsageError(f"token: invalid value {i}", "set token to a number of at least 0")
            name = self.id_to_token(i)
            spelled = self._bytes[i] = b"" if name is None else self.spec.spell(name)
        return spelled

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """(V,): the number of bytes of each token."""
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int64)

    @cached_property
    def merge_pairs(self) -> NDArray[np.int64]:
        """(V, 2): the two tokens that each was merged from; -1 for characters and other tokens."""
        vocab, pairs = self.spec.vocab, np.full((self.vocab_size, 2), -1, np.int64)
        for names in reversed(self.merges()):  # with the same result, the first merge counts
            left, right, merged = (vocab[name] for name in (*names, "".join(names)))
            if max(left, right, merged) >= self.vocab_size:
                continue
            spelled = self.token_bytes(merged)  # b"" for special tokens
            n_characters = sum(byte & 0xC0 != 0x80 for byte in spelled)
            parts = self.token_bytes(left) + self.token_bytes(right)
            if n_characters > 1 and spelled == parts:
                pairs[merged] = left, right
        return pairs

    @cached_property
    def unused_ids(self) -> list[int]:
        """The ids below `vocab_size` that no token has."""
        if self._has_all_ids:
            return []
        used = {*self.token_ids.values()}
        return [i for i in range(self.vocab_size) if i not in used]

    def id_to_token(self, i: int) -> str | None:
        """Return a token as the vocabulary writes it; None if the id has none."""
        return self._names.get(i)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {i: name for name, i in self.token_ids.items()}

    @property
    def token_ids(self) -> dict[str, int]:
        """The ids of all tokens, by the names that the vocabulary has for them."""
        return self.spec.vocab | self.added_tokens

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """The ids of the added tokens without bytes, by name."""
        return {name: i for name, i in self.added_tokens.items() if not self.token_bytes(i)}

    def encode_with_special(
        self, text: str, *, continuation: bool = False
    ) -> list[tuple[int, int, int]]:
        """Encode a text in which special tokens count, or with `continuation` the rest of one: each
        id with its start and end in `text`, in characters.

        What the vocabulary cannot express is left out, see `check_expressible`. Raises UsageError
        for a token that the model does not have.
        """
        spans: list[tuple[int, int, int]] = []
        offset, pair = 0, self._backends_for(text).with_special
        for n, part in enumerate(_INVALID_UTF8.split(text)):
            if n % 2:
                spans += [
                    (i, offset + k, offset + k + 1)
                    for k, i in enumerate(self._encode_invalid(part))
                ]
            elif part:
                backend = pair.continuation if offset or continuation else pair.at_start
                try:
                    encoding = backend.encode(part, add_special_tokens=False)
                except Exception:  # the library raises plain Exception for an unknown word
                    if self.spec.word_level:  # name it
                        list(self._word_ids(part, prefix=backend is pair.at_start))
                    raise
                offsets = zip(encoding.ids, encoding.offsets, strict=True)
                spans += [(i, offset + start, offset + end) for i, (start, end) in offsets]
            offset += len(part)
        self.check_ids([i for i, _, _ in spans])
        return spans

    def _encode_invalid(self, text: str) -> list[int]:
        ids = (self._byte_ids[ord(character) - 0xDC00] for character in text)
        return [i for i in ids if i is not None]

    def _encode_words(self, words: WordIds, text: str) -> list[NDArray[np.uint32]]:
        arrays: list[NDArray[np.uint32]] = []
        blocks = split_blocks(text, self._cut, _SMALL_BLOCK)
        for is_ascii, group in groupby(blocks, str.isascii):
            chunks = list(split_blocks("".join(group), self._cut))
            arrays += (
                map(words.encode, chunks) if is_ascii else _encode_chunks(words.backend, chunks)
            )
        return arrays

    @cached_property
    def _words(self) -> WordIds | None:
        """The ids of words, for a tokenizer that splits words as those trained here do."""
        spec = self.spec
        plain = spec.byte_level and not (spec.prefix or spec.normalizers or spec.byte_patterns)
        if not plain or spec.patterns != (LLAMA3,):
            return None
        if any(not token.special for token in spec.added_tokens):  # they may cross words
            return None
        backends = self._all or self._make_all()
        return WordIds(backends.plain.at_start)

    def _encode_valid(
        self, pair: BackendPair, text: str, *, at_start: bool
    ) -> list[NDArray[np.uint32]]:
        whole = any(name in text for name in self._prefix_breaks)
        chunks = list(split_blocks(text, None if whole else self._cut))
        n_first = 1 if at_start and self.spec.prefix else 0
        first = _encode_chunks(pair.at_start, chunks[:n_first])
        return first + _encode_chunks(pair.continuation, chunks[n_first:])


class TokenBytes(Sequence[bytes]):
    """The bytes of a tokenizer's tokens by id, spelled when they are needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._tokenizer.vocab_size

    def __getitem__(self, i: int) -> bytes:  # type: ignore[override]  # no slices
        """Return the bytes of a token."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self._tokenizer.token_bytes(i)


def split_blocks(text: str, cut: re.Pattern[str] | None, size: int | None = None) -> Iterator[str]:
    """Split a text into blocks of about `size` characters (None: `_BLOCK`); whole if it must not be
    cut."""
    start, size = 0, size or _BLOCK
    while start < len(text):
        match = cut.search(text, start + size) if cut and len(text) - start > size else None
        end = match.start() if match else len(text)
        yield text[start:end]
        start = end


def _encode_chunks(backend: Backend, chunks: list[str]) -> list[NDArray[np.uint32]]:
    arrays = []
    for start in range(0, len(chunks), _MAX_BLOCKS):
        batch = chunks[start : start + _MAX_BLOCKS]
        encodings = backend.encode_batch_fast(batch, add_special_tokens=False)
        arrays += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        del encodings  # before the next ones are made
    return arrays


class TextStream:
    """A converter of successive tokens' bytes into whole characters, without loss.

    `feed` buffers the bytes of an incomplete character, `flush` returns them as they are. Bytes
    that can never become a character pass through.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def feed(self, data: bytes) -> bytes:
        """Return all characters that are complete after `data`."""
        return self._decoder.decode(data).encode("utf-8", "surrogateescape")

    def flush(self) -> bytes:
        """Return the buffered bytes."""
        rest = self._decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")
        self._decoder.reset()
        return rest


def _cut_pattern(spec: TokenizerSpec) -> re.Pattern[str] | None:
    """Return a pattern that matches where a text may be cut; None if no cut is known to be safe.

    With a prefix, a text that contains one of `prefix_breaks` must not be cut at all.
    """
    in_text = [token for token in spec.added_tokens if not token.special]
    if any(_AFTER_LINE.search(token.content) for token in in_text):
        return None  # a token may cross the cut
    if any(token.lstrip or (token.single_word and "\n" in token.content) for token in in_text):
        return None  # they depend on the characters beside them, beyond the cut
    if spec.word_end:
        return LINE_STARTS  # whitespace separates words
    for pattern in spec.patterns:
        if CUT_PATTERNS[pattern]:
            return CUT_PATTERNS[pattern]
    if spec.ignore_merges:
        return None  # a chunk may be one token as a whole
    crosses_lines = _CROSSES_LINES[spec.byte_level]
    return None if any(map(crosses_lines.search, spec.vocab)) else LINE_STARTS


def _find_prefix_breaks(spec: TokenizerSpec) -> tuple[str, ...]:
    """Return the added tokens after which a text gets a space again.

    If normalization may produce one of them, it is the empty string, which every text contains.
    """
    in_text = [token for token in spec.added_tokens if not token.special]
    if not spec.prefix or not in_text:
        return ()
    if any(token.normalized for token in in_text):
        return ("",)
    return tuple(token.content for token in in_text)
