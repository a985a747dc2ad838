"""Train tokenizers, both byte-level BPE in the format of the tokenizers library.

The merges of `char` build every multi-byte character of the corpus and nothing else, so a token is
a character; `bpe` learns its merges.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from tgen.errors import TokenizerError, UsageError
from tgen.storage import files
from tgen.tokenizer.allowlist import DAMAGED_HINT
from tgen.tokenizer.backend import UNKNOWN, Backend, split_words
from tgen.tokenizer.patterns import LINE_STARTS, LLAMA3
from tgen.tokenizer.tokenizer import END_OF_TEXT, PAD, Tokenizer, split_blocks
from tgen.tokenizer.tokenizer_json import BYTE_CHARACTERS, WORD_STAGES

DEFAULT_VOCAB_SIZE = 1024
_LIMIT = 64 << 20  # bytes of a tokenizer.json
_MAX_WORD = 1024  # characters; a longer run is not a word
_RUN_PIECE = 128  # characters of such a run; training is faster on shorter pieces
_WORD_CLASSES = (r"(?:[^\W\d_])", r"\s", r"(?:[^\w\s]|_)")  # letters, whitespace, others
_LONG_RUNS = re.compile("|".join(f"(?<!{c}){c}{{{_MAX_WORD + 1},}}" for c in _WORD_CLASSES))


def make_tokenizer(kind: str, texts: list[bytes], *, vocab_size: int | None = None) -> Tokenizer:
    """Train `char` or `bpe` on the texts, or load the tokenizer.json at a path (file or directory).

    Raises UsageError for another kind, or for a vocabulary too small for all bytes.
    """
    min_size = 256 + len([END_OF_TEXT, PAD])
    if kind in ("char", "bpe") and vocab_size is not None and vocab_size < min_size:
        raise UsageError(
            f"vocab_size: too small (got {vocab_size}, expected at least {min_size})",
            f"set it to {min_size} or more: 256 bytes and two special tokens",
            field="vocab_size",
        )
    if kind == "char":
        return train_char(texts, vocab_size=vocab_size)
    if kind == "bpe":
        return train_bpe(texts, vocab_size=vocab_size or DEFAULT_VOCAB_SIZE)
    path = Path(kind) / "tokenizer.json" if Path(kind).is_dir() else Path(kind)
    if not path.exists():
        raise UsageError(
            f"unknown tokenizer {kind!r}", "pass char, bpe, word, or the path of a tokenizer.json"
        )
    if vocab_size is not None:
        raise UsageError(
            f"vocab_size={vocab_size} has no effect with the tokenizer {kind!r}",
            "remove one of them: a tokenizer.json has its own size",
            field="vocab_size",
        )
    try:
        return Tokenizer(files.read(path, limit=_LIMIT).decode("utf-8", errors="replace"))
    except TokenizerError as error:
        hint = "pass char, bpe, word, or the path of a tokenizer.json"
        hint = hint if error.hint == DAMAGED_HINT else error.hint
        raise TokenizerError(f"tokenizer {kind!r}: {error.message}", hint) from None


def train_char(texts: Iterable[bytes], *, vocab_size: int | None = None) -> Tokenizer:
    """Make one token per character of the texts, most frequent first, up to `vocab_size`."""
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
                break  # the vocabulary is full: this character remains several tokens
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _add_special_tokens(backend)


def train_words(
    texts: Iterable[tuple[bytes, bool]], *, vocab_size: int | None = None, unknown: bool = False
) -> Tokenizer:
    """Make one token per word of the texts, most frequent first; each comes with whether it begins
    a document.

    With `unknown`, other words become `<unk>`, and `vocab_size` limits the vocabulary. Raises
    UsageError for a smaller `vocab_size` without it, and for a text that is not UTF-8.
    """
    counts: Counter[str] = Counter()
    for data, begins in texts:
        try:
            counts.update(split_words(data.decode(), prefix=begins) if data else [])
        except UnicodeDecodeError:
            raise UsageError("--tokenizer word: the corpus is not UTF-8", "use char") from None
    special = [END_OF_TEXT, PAD, *([UNKNOWN] if unknown else [])]
    words = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    words = [word for word in words if word not in special]
    if vocab_size is not None and vocab_size < len(special) + len(words):
        if not unknown or vocab_size <= len(special):
            least = len(special) + 1 if unknown else len(special) + len(words)
            raise UsageError(
                f"vocab_size: too small (got {vocab_size}, expected at least {least})",
                "add --unk to encode rare words as <unk>, or set a larger one",
                field="vocab_size",
            )
        words = words[: vocab_size - len(special)]
    vocab = {word: i for i, word in enumerate([*special, *words])}
    added = [
        {"id": vocab[name], "content": name, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False, "special": True}
        for name in special
    ]
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": UNKNOWN}
    file = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return Tokenizer(json.dumps(file | WORD_STAGES | {"model": model}, indent=2))


def train_bpe(texts: Iterable[bytes], *, vocab_size: int = DEFAULT_VOCAB_SIZE) -> Tokenizer:
    """Learn byte-pair encoding from the texts; a small corpus may yield fewer tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
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
    blocks = (block for text in decoded for block in split_blocks(text, LINE_STARTS))
    pieces = (piece for block in blocks for piece in split_long_runs(block))
    backend.train_from_iterator(pieces, trainer)
    return _add_special_tokens(backend)


def _add_special_tokens(backend: Backend) -> Tokenizer:
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(END_OF_TEXT, special=True), AddedToken(PAD, special=True)]
    )
    return Tokenizer(backend.to_str(pretty=True))


def split_long_runs(text: str) -> Iterator[str]:
    """Split a text inside runs of one class of characters that are longer than any word.

    BPE training takes time in the square of a word's length.
    """
    start = 0
    for run in _LONG_RUNS.finditer(text):
        for end in range(run.start() + _RUN_PIECE, run.end(), _RUN_PIECE):
            yield text[start:end]
            start = end
    yield text[start:]
