"""The words of a model's training text and held-out text, from the tokens that its run stores."""

from collections.abc import Iterator, Sequence
from itertools import chain, dropwhile
from pathlib import Path

from tgen.errors import UsageError
from tgen.generation.words import is_word_character, last_word, split_words, starts_in_word
from tgen.runs import saved_state
from tgen.storage.disk_array import Array, blocks


def read_training_words(path: Path, tokens: Sequence[bytes]) -> set[bytes]:
    """Return the words of the training text and the held-out text of a model or an adapter, whose
    vocabulary is `tokens`, without a word that the border of the two texts cuts.

    Raises UsageError for one without the tokens of its run, TrainingError if they are damaged.
    """
    if not saved_state.is_run(path):
        message = f"words: {path} has no training text beside it"
        raise UsageError(message, "name a text file instead of corpus", field="words")
    arrays = saved_state.load_tokens(path, saved_state.load_record(path)[1], vocab_size=len(tokens))
    train, val = (_read_lines(arrays[name], tokens) for name in ("train", "val"))
    words: set[bytes] = set()
    last = b""
    for text in train:
        words |= split_words(last)
        last = text
    for text in chain(_remove_cut_word(last, next(val)), val):
        words |= split_words(text)
    return words


def _read_lines(array: Array, tokens: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the text of an array in blocks of whole lines, and the last line without a line break.

    Control tokens count as line breaks, except for one at the start.
    """
    pieces = [token or b"\n" for token in tokens]
    rest = b""
    for number, block in enumerate(blocks(array)):
        ids = block.tolist()
        skip = 1 if number == 0 and not tokens[ids[0]] else 0
        text = rest + b"".join(map(pieces.__getitem__, ids[skip:]))
        if end := text.rfind(b"\n") + 1:
            yield text[:end]
        rest = text[end:]
    yield rest


def _remove_cut_word(before: bytes, after: bytes) -> tuple[bytes, bytes]:
    """Return two texts without the word that ends the first and continues in the second.

    The second may be a later part of the same document, so that they cannot be joined.
    """
    if not (starts_in_word(after) and last_word(before)):
        return before, after
    while word := last_word(before):  # more than one if it is longer than `last_word` returns
        before = before[: -len(word)]
    characters = after.decode("utf-8", "surrogateescape")
    after = "".join(dropwhile(is_word_character, characters)).encode("utf-8", "surrogateescape")
    return before, after
