"""Byte-level tokenizers: bytes -> ids -> the same bytes, whatever the bytes are.

Both kinds are byte-level BPE in the tokenizers library's own format. `char` has merges that build
every multi-byte character seen in the corpus and no others, so a token is a character; `bpe` learns
its merges. All 256 bytes are in both vocabularies: nothing is ever unknown, and bytes that are no
valid UTF-8 become their byte tokens.
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer

from tgen import files
from tgen.errors import TokenizerError, UsageError

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
DEFAULT_VOCAB_SIZE = 1024

# Llama 3's pattern: GGUF readers know a tokenizer by exactly this text.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Where a text may be cut without changing its tokens: `WORDS` ends a word after each line break
# that a visible character follows.
_CUT = re.compile(r"(?<=\n)(?=\S)")
_BLOCK = 1 << 17  # characters a thread encodes at a time
_STRAY = re.compile("[\udc80-\udcff]+")  # how surrogateescape shows bytes that are no UTF-8


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte, by byte value."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {byte: chr(byte) for byte in visible}
    table |= {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


class Tokenizer:
    """Turns bytes into ids and back. `json` is the tokenizer.json it came from."""

    def __init__(self, json_text: str, *, ends: Sequence[int] = ()) -> None:
        """`ends` are what a model says of the tokens that end its texts: from elsewhere they may
        have another name than ours. Raises TokenizerError if `json_text` is not a byte-level BPE
        tokenizer.
        """
        self.json = json_text
        self._backend = _load_backend(json_text)
        self._backend.encode_special_tokens = True  # text never turns into control tokens
        vocab = self._backend.get_vocab(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.vocab_size = max(vocab.values()) + 1
        self._bytes = [b""] * self.vocab_size
        for token, i in vocab.items():
            if token not in special:
                self._bytes[i] = _token_bytes(token)
        try:
            self._byte_ids = [vocab[character] for character in BYTE_CHARACTERS]
        except KeyError:
            raise TokenizerError(
                "the tokenizer lacks some of the 256 byte tokens",
                "only byte-level BPE tokenizers can be used",
            ) from None
        ours = vocab.get(END_OF_TEXT)
        known = [i for i in ends if i in special.values()]
        self.end_of_text = ours if not known or ours in known else known[0]
        self.pad = vocab.get(PAD)

    def encode(self, data: bytes) -> list[int]:
        """The ids of any bytes; special tokens written out in the text stay plain text."""
        ids: list[int] = self.encode_array(data).tolist()
        return ids

    def encode_prompt(self, data: bytes) -> list[int]:
        """As `encode`; an empty prompt starts where documents start, after an end-of-text token."""
        ids = self.encode(data)
        return ids or ([] if self.end_of_text is None else [self.end_of_text])

    def encode_array(self, data: bytes) -> NDArray[np.uint32]:
        """As `encode`, as an array (n,) uint32: a corpus has too many ids for a list."""
        text = data.decode("utf-8", errors="surrogateescape")
        parts: list[Sequence[int]] = []
        start = 0
        for stray in _STRAY.finditer(text):
            parts += self._encode_text(text[start : stray.start()])
            parts.append([self._byte_ids[ord(c) - 0xDC00] for c in stray.group()])
            start = stray.end()
        parts += self._encode_text(text[start:])
        return np.concatenate([np.zeros(0, np.uint32), *(np.array(p, np.uint32) for p in parts)])

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids; special tokens have none."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, i: int) -> bytes:
        """The bytes that one token stands for: perhaps only a part of a character.

        None for ids past the vocabulary, which some models have to round their sizes up.
        """
        return self._bytes[i] if i < self.vocab_size else b""

    @cached_property
    def merge_pairs(self) -> NDArray[np.int64]:
        """(V, 2): the two tokens that each was merged from; -1 for those that were not, and for
        single characters."""
        model = json.loads(self.json)["model"]
        vocab, found = model["vocab"], np.full((self.vocab_size, 2), -1, np.int64)
        for merge in reversed(model["merges"]):  # where two make the same token the first counts
            # A pair, or in older files both in one string; some of those begin with a comment.
            names = merge.split(" ") if isinstance(merge, str) else merge
            if len(names) != 2 or "".join(names) not in vocab:
                continue
            left, right, whole = (vocab[name] for name in (*names, "".join(names)))
            made = self._bytes[whole]  # b"" for special tokens, which are not text
            if _n_characters(made) > 1 and made == self._bytes[left] + self._bytes[right]:
                found[whole] = left, right
        return found

    def id_to_token(self, i: int) -> str | None:
        """How the tokenizer itself writes a token; None if there is none."""
        name: str | None = self._backend.id_to_token(i)
        return name

    def _encode_text(self, text: str) -> list[list[int]]:
        blocks = list(_blocks(text))
        return [e.ids for e in self._backend.encode_batch_fast(blocks, add_special_tokens=False)]


def _n_characters(data: bytes) -> int:
    """Of UTF-8 that may lack a character's beginning: that is none."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


class TextStream:
    """Turns the bytes of token after token into whole characters, losing none.

    `feed` holds back the bytes of an unfinished character, `flush` gives them as they are. Bytes
    that can never become a character pass through.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def feed(self, data: bytes) -> bytes:
        """All that is complete after `data`."""
        return self._decoder.decode(data).encode("utf-8", "surrogateescape")

    def flush(self) -> bytes:
        """What was still held back."""
        rest = self._decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")
        self._decoder.reset()
        return rest


def make_tokenizer(kind: str, texts: list[bytes], *, vocab_size: int | None = None) -> Tokenizer:
    """`char` or `bpe`, trained on the texts, or the tokenizer at a path (a file or its directory).

    Raises UsageError for a kind that is none of these or a vocabulary without room for all bytes.
    """
    smallest = 256 + len([END_OF_TEXT, PAD])
    if vocab_size is not None and vocab_size < smallest:
        raise UsageError(
            f"vocab_size is {vocab_size}",
            f"it must be at least {smallest}: 256 bytes and two special tokens",
        )
    if kind == "char":
        return train_char(texts, vocab_size=vocab_size)
    if kind == "bpe":
        return train_bpe(texts, vocab_size=vocab_size or DEFAULT_VOCAB_SIZE)
    path = Path(kind) / "tokenizer.json" if Path(kind).is_dir() else Path(kind)
    if not path.exists():
        raise UsageError(
            f"tokenizer {kind!r} is unknown", "give char, bpe, or the path of a tokenizer.json"
        )
    return Tokenizer(files.read(path).decode("utf-8", errors="replace"))


def train_char(texts: Iterable[bytes], *, vocab_size: int | None = None) -> Tokenizer:
    """One token a character of the texts, the most frequent first, up to `vocab_size` in all."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.decode("utf-8", errors="ignore"))
    vocab = {token: i for i, token in enumerate([END_OF_TEXT, PAD, *BYTE_CHARACTERS])}
    merges: list[tuple[str, str]] = []
    for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        pieces = [BYTE_CHARACTERS[byte] for byte in character.encode()]
        for n in range(1, len(pieces)):
            prefix, piece = "".join(pieces[:n]), pieces[n]
            if prefix + piece not in vocab and (vocab_size is None or len(vocab) < vocab_size):
                vocab[prefix + piece] = len(vocab)
                merges.append((prefix, piece))
            elif prefix + piece not in vocab:
                break  # the vocabulary is full: this character stays in pieces
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _finish(backend)


def train_bpe(texts: Iterable[bytes], *, vocab_size: int = DEFAULT_VOCAB_SIZE) -> Tokenizer:
    """Byte-pair encoding learnt from the texts; a small corpus may yield fewer tokens."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    blocks = (block for text in texts for block in _blocks(text.decode("utf-8", errors="ignore")))
    backend.train_from_iterator(blocks, trainer)
    return _finish(backend)


def _finish(backend: BackendTokenizer) -> Tokenizer:
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(END_OF_TEXT, special=True), AddedToken(PAD, special=True)]
    )
    return Tokenizer(backend.to_str(pretty=True))


def _load_backend(json_text: str) -> BackendTokenizer:
    try:
        decoder = (json.loads(json_text)["decoder"] or {}).get("type")
        backend = BackendTokenizer.from_str(json_text)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(
            f"tokenizer.json cannot be read: {error}", "the file is damaged: fetch it again"
        ) from None
    if decoder != "ByteLevel" or not isinstance(backend.model, models.BPE):
        raise TokenizerError(
            f"tokenizer.json is {type(backend.model).__name__} with decoder {decoder}",
            "only byte-level BPE tokenizers can be used",
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


def _token_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token, written as it is
        return token.encode()


def _blocks(text: str) -> Iterator[str]:
    """Cuts a long text where no token can cross, so that the library never sees it whole."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + _BLOCK)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end
