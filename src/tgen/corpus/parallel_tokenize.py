"""Tokenize pieces of text in order, a large corpus with several worker processes.

Batches of pieces go to the workers in rotation, and their tokens are taken in the same order: each
worker has one batch, so memory is bounded, and the tokens equal those of a single process. A worker
exits when its stdin closes, so none outlives this process. Workers are not forked, because this
process has threads, and do not import the user's program, which needs no `__main__` guard.

A worker runs `python -m tgen.corpus.parallel_tokenize`. It reads the tokenizer.json, then per batch
a table (n, 2) int64, the length of each piece and whether it continues a document, and the bytes of
all pieces. It writes a table (n, 2) int64, the number of tokens of each piece and of characters
replaced in it (-1: the piece cannot be encoded), and the tokens, uint32.

On several ranks, rank 0 sends each rank a batch per worker and receives all tokens, in rounds.
"""

import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen import distributed
from tgen.errors import TgenError
from tgen.machine import child
from tgen.tokenizer import Tokenizer

_BATCH = 1 << 20  # bytes after which a batch is sent
_LENGTH = struct.Struct("<q")  # precedes each message


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

    With `on_ranks`, all ranks call this and use a number of `processes` of their own; only rank 0
    passes pieces. Raises TgenError if a worker dies, and CorpusError and UsageError as
    `Tokenizer.encode_corpus`.
    """
    if on_ranks:
        yield from _encode_on_ranks(pieces, tokenizer, processes)
        return
    if processes == 1:
        for piece in pieces:
            yield _encode(tokenizer, piece)
        return
    workers: list[_Worker] = []
    in_progress: deque[tuple[_Worker, list[Piece]]] = deque()
    try:
        for batch in _make_batches(pieces):
            done: Iterable[Encoded] = ()
            if len(workers) < processes:
                worker = _Worker(tokenizer)
                workers.append(worker)
            else:
                worker, finished = in_progress.popleft()
                done = _read_answer(worker.receive(), finished, tokenizer)
            worker.send_batch(batch)  # before the caller processes the last tokens
            in_progress.append((worker, batch))
            yield from done
        for worker, finished in in_progress:
            yield from _read_answer(worker.receive(), finished, tokenizer)
    finally:
        for worker in workers:
            worker.kill()


def _encode_on_ranks(
    pieces: Iterable[Piece], tokenizer: Tokenizer, processes: int
) -> Iterator[Encoded]:
    batches, n_workers = _make_batches(pieces), distributed.all_gather(processes)

    def next_round() -> list[Any]:
        shares = [list(islice(batches, n)) for n in n_workers]
        return shares if any(shares) else [None] * len(shares)

    workers: list[_Worker] = []
    done: Iterable[list[Encoded]] = ()
    shares = next_round()
    try:
        while (own := distributed.scatter(shares)) is not None:
            workers += [_Worker(tokenizer) for _ in own[len(workers) :]]
            for worker, batch in zip(workers, own, strict=False):
                worker.send_batch(batch)
            yield from chain.from_iterable(done)  # while the workers work
            sent, shares = shares, next_round()
            answers = distributed.gather([worker.receive() for worker in workers[: len(own)]])
            done = map(_read_answer, chain(*answers or ()), chain(*sent), repeat(tokenizer))
        yield from chain.from_iterable(done)
    finally:
        for worker in workers:
            worker.kill()


def _read_answer(
    answer: tuple[bytes, bytes], pieces: list[Piece], tokenizer: Tokenizer
) -> list[Encoded]:
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


class _Worker:
    """The parent's end of a worker process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._child = subprocess.Popen(
            child.command("-m", "tgen.corpus.parallel_tokenize"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child.environment() | {"RAYON_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is handled by this process
        )
        self._send(tokenizer.json.encode())

    def send_batch(self, batch: list[Piece]) -> None:
        table = [(len(piece.text), not piece.starts_document) for piece in batch]
        self._send(np.array(table, np.int64).tobytes())
        self._send(b"".join(piece.text for piece in batch))

    def receive(self) -> tuple[bytes, bytes]:
        """Wait for the counts and tokens of the batch."""
        return self._receive(), self._receive()

    def kill(self) -> None:
        child.kill(self._child)

    def _send(self, data: bytes) -> None:
        assert self._child.stdin
        try:
            _send(self._child.stdin, data)
        except OSError:
            raise _worker_died() from None

    def _receive(self) -> bytes:
        assert self._child.stdout
        data = _receive(self._child.stdout)
        if data is None:
            raise _worker_died()
        return data


def _worker_died() -> TgenError:
    return TgenError(
        "a tokenizer process exited unexpectedly",
        "add --threads 1 to use fewer processes: it may have run out of memory",
    )


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes | None:
    """Return one message; None at the end of the stream or if it is truncated."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (n,) = _LENGTH.unpack(head)
    data = stream.read(n)
    return data if len(data) == n else None


def _run_worker() -> None:
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tokenizer_json = _receive(source)
    if tokenizer_json is None:
        return
    tokenizer = Tokenizer(tokenizer_json.decode())
    while (table := _receive(source)) is not None and (text := _receive(source)) is not None:
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
        _send(target, np.array(counts, np.int64).tobytes())
        _send(target, np.concatenate(arrays).tobytes())


if __name__ == "__main__":
    _run_worker()
