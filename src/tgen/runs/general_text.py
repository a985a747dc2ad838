"""The user's general text, whose loss fine-tuning reports before and after; see `forgetting`."""

from pathlib import Path

from tgen import corpus
from tgen.config.input_files import Reading
from tgen.corpus.steps import Steps
from tgen.errors import CorpusError

GENERAL_BYTES = 1 << 15


def read_general(path: Path, reading: Reading) -> Steps[bytes]:
    """Return the first 32 KB of the user's general text, or of the texts of rows; CorpusError for
    an empty text."""
    try:
        read = yield from corpus.read_in_steps(
            [str(path)], reading=Reading(encoding=reading.encoding)
        )
    except CorpusError as error:
        raise CorpusError(f"--general {path}: {error.message}", error.hint) from None
    texts: list[bytes] = []
    for document in read.documents:
        parts = [part[:GENERAL_BYTES] for part in document]
        if read.is_chat:
            messages = corpus.parse_conversation(b"".join(part[:] for part in document)).messages
            parts = [message["content"].encode() + b"\n" for message in messages]
        texts.append(b"".join(parts))
        if sum(map(len, texts)) >= GENERAL_BYTES:
            break
    read.close()
    text = b"\n".join(texts)[:GENERAL_BYTES]
    return text.decode("utf-8", errors="ignore").encode() or text


def cut_general(text: bytes, n_tokens: int, limit: int) -> bytes:
    """Return about the first `limit` of a text's `n_tokens` tokens."""
    if n_tokens <= limit:
        return text
    text = text[: len(text) * limit // n_tokens]
    return text.decode("utf-8", errors="ignore").encode() or text
