"""New tokenizers, byte-level BPE both, in the tokenizers library's own format.

`char` has merges that build every multi-byte character seen in the corpus and no others, so a token
is a character; `bpe` learns its merges.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from tgen.errors import UsageError
from tgen.storage import files
from tgen.tokenizer.backend import Backend
from tgen.tokenizer.byte_alphabet import BYTE_CHARACTERS
from tgen.tokenizer.chunking import blocks, bounded
from tgen.tokenizer.patterns import LINES, WORDS
from tgen.tokenizer.tokenizer import END_OF_TEXT, PAD, Tokenizer

DEFAULT_VOCAB_SIZE = 1024
_LIMIT = 64 << 20  # bytes of a tokenizer.json


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
    return Tokenizer(files.read(path, limit=_LIMIT).decode("utf-8", errors="replace"))


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
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _finish(backend)


def train_bpe(texts: Iterable[bytes], *, vocab_size: int = DEFAULT_VOCAB_SIZE) -> Tokenizer:
    """Byte-pair encoding learnt from the texts; a small corpus may yield fewer tokens."""
    backend = Backend(models.BPE())
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
    decoded = (text.decode("utf-8", errors="ignore") for text in texts)
    parts = (part for text in decoded for b in blocks(text, LINES) for part in bounded(b))
    backend.train_from_iterator(parts, trainer)
    return _finish(backend)


def _finish(backend: Backend) -> Tokenizer:
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(END_OF_TEXT, special=True), AddedToken(PAD, special=True)]
    )
    return Tokenizer(backend.to_str(pretty=True))
