"""The words of the text that a model was trained on, from the tokens that its run stores."""

from collections.abc import Sequence
from pathlib import Path

from tgen.errors import UsageError
from tgen.generation.words import split_words
from tgen.runs import saved_state
from tgen.storage.disk_array import blocks


def read_training_words(path: Path, tokens: Sequence[bytes]) -> set[bytes]:
    """Return the words of the training text and the held-out text of a model or an adapter, whose
    vocabulary is `tokens`.

    Raises UsageError for one without the tokens of its run, TrainingError if they are damaged.
    """
    if not saved_state.is_run(path):
        message = f"words: {path} has no training text beside it"
        raise UsageError(message, "name a text file instead of corpus", field="words")
    arrays = saved_state.load_tokens(path, saved_state.load_record(path)[1], vocab_size=len(tokens))
    pieces = [token or b"\n" for token in tokens]  # a control token ends a text
    words: set[bytes] = set()
    for name in ("train", "val"):
        rest = b""  # of a line that the next block continues
        for block in blocks(arrays[name]):
            text = rest + b"".join(map(pieces.__getitem__, block.tolist()))
            end = text.rfind(b"\n") + 1
            words |= split_words(text[:end])
            rest = text[end:]
        words |= split_words(rest)
    return words
