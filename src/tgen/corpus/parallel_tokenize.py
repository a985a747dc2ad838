"""Tokenize pieces of text in order, a large corpus with several worker processes.

A worker's first message is the tokenizer.json. Every later one is a batch of pieces: a table (n, 2)
int64, the length of each piece and whether it continues a document, and the bytes of all pieces.
The answer is a table (n, 2) int64, the number of tokens of each piece and of characters replaced in
it (-1: the piece cannot be encoded), and the tokens, uint32.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.errors import TgenError
from tgen.machine.worker_pool import Message, answer_messages, map_messages
from tgen.tokenizer import Tokenizer

_BATCH = 1 << 20  # bytes after which a batch is sent
MODULE = "tgen.corpus.parallel_tokenize"  # of the workers


class Piece(NamedTuple):
    """A part of a document that is tokenized separately."""

    text: bytes
    starts_document: bool
    in_loss: bool


# Piece, its tokens (n,) uint32, number of replaced characters.
Encoded = tuple[Piece, NDArray[Any], int]


def encode_pieces(
    pieces: Iterable[Piece], tokenizer: Tokenizer, *, processes: int = 1, on_ranks: bool = False
) -> Iterator[Encoded]:
    """Yield every piece with its tokens and the number of characters that the tokenizer cannot
    express, in order.

    With `on_ranks`, rank 0 calls this, and the other ranks `map_messages` with no messages. Raises
    TgenError if a worker dies, and CorpusError and UsageError as `Tokenizer.encode_corpus`.
    """
    if processes == 1 and not on_ranks:
        for piece in pieces:
            yield _encode(tokenizer, piece)
        return
    sent: deque[list[Piece]] = deque()

    def messages() -> Iterator[Message]:
        for batch in _make_batches(pieces):
            sent.append(batch)
            table = [(len(piece.text), not piece.starts_document) for piece in batch]
            text = b"".join(piece.text for piece in batch)
            yield np.array(table, np.int64).tobytes(), text

    first = first_message(tokenizer)
    for answer in map_messages(messages(), MODULE, first, processes=processes, on_ranks=on_ranks):
        yield from _read_answer(answer, sent.popleft(), tokenizer)


def first_message(tokenizer: Tokenizer) -> Message:
    """Return the first message to a worker."""
    return [tokenizer.json.encode()]


def _read_answer(answer: Message, pieces: list[Piece], tokenizer: Tokenizer) -> list[Encoded]:
    counts = np.frombuffer(answer[0], np.int64).reshape(-1, 2)
    arrays = np.split(np.frombuffer(answer[1], np.uint32), np.cumsum(counts[:, 0])[:-1])
    encoded = list(zip(pieces, arrays, counts[:, 1].tolist(), strict=True))
    for piece, ids, n_replaced in encoded:
        tokenizer.check_ids(ids)  # the worker does not know the model
        if n_replaced < 0:
            _encode(tokenizer, piece)  # raises the error
    return encoded


def _encode(tokenizer: Tokenizer, piece: Piece) -> Encoded:
    continues = not piece.starts_document
    return piece, *tokenizer.encode_corpus(piece.text, continuation=continues)


def _make_batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    n_bytes = 0
    for piece in pieces:
        batch.append(piece)
        n_bytes += len(piece.text)
        if n_bytes >= _BATCH:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _make_encoder(first: Message) -> partial[Message]:
    return partial(_encode_batch, Tokenizer(first[0].decode()))


def _encode_batch(tokenizer: Tokenizer, message: Message) -> Message:
    table, text = message
    start, arrays, counts = 0, [], []
    for length, continues in np.frombuffer(table, np.int64).reshape(-1, 2).tolist():
        piece = text[start : start + length]
        try:
            ids, n = tokenizer.encode_corpus(piece, continuation=bool(continues))
        except TgenError:
            ids, n = np.zeros(0, np.uint32), -1
        arrays.append(ids)
        counts.append((len(ids), n))
        start += length
    return np.array(counts, np.int64).tobytes(), np.concatenate(arrays).tobytes()


if __name__ == "__main__":
    answer_messages(_make_encoder)
