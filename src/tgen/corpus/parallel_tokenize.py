"""Pieces of text -> their tokens, in order; of a large text by several processes.

Batches of pieces are dealt out in turn, and their tokens taken in the same turn: there is one batch
with each process, so that memory is bounded, and the tokens are those of one process. A process
ends when its stdin does: however this one ends, none is left. It is no fork, since there are
threads, and it runs nothing of the program that trains, which need not be made for that.
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.tokenize_worker import receive, send
from tgen.errors import TgenError
from tgen.tokenizer import Tokenizer

_BATCH = 1 << 20  # bytes from which pieces are enough to be sent


class Piece(NamedTuple):
    """A part of a document that is tokenised apart."""

    text: bytes
    begins: bool  # a document
    scored: bool


def encoded(
    pieces: Iterable[Piece], tokenizer: Tokenizer, *, processes: int = 1
) -> Iterator[tuple[Piece, NDArray[Any]]]:
    """Every piece with its tokens, (n,) uint32, in order. Raises TgenError where a process ends."""
    if processes == 1:
        for piece in pieces:
            yield piece, tokenizer.encode_array(piece.text, continues=not piece.begins)
        return
    encoders: list[_Encoder] = []
    under_way: deque[tuple[_Encoder, list[Piece]]] = deque()
    try:
        for batch in _batches(pieces):
            done: Iterable[tuple[Piece, NDArray[Any]]] = ()
            if len(encoders) < processes:
                encoder = _Encoder(tokenizer)
                encoders.append(encoder)
            else:
                encoder, before = under_way.popleft()
                done = zip(before, encoder.take(), strict=True)
            encoder.give(batch)  # before its last tokens are looked at
            under_way.append((encoder, batch))
            yield from done
        for encoder, before in under_way:
            yield from zip(before, encoder.take(), strict=True)
    finally:
        for encoder in encoders:
            encoder.end()


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces together, unless they are large."""
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


class _Encoder:
    """A process that tokenises: see `encoder`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._child = subprocess.Popen(
            # -P: not from whatever folder this happens to be.
            [sys.executable, "-P", "-m", "tgen.corpus.tokenize_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAYON_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is this process's matter
        )
        self._send(tokenizer.json.encode())

    def give(self, batch: list[Piece]) -> None:
        """Sends what is to be tokenised."""
        table = np.array([(len(piece.text), not piece.begins) for piece in batch], np.int64)
        self._send(table.tobytes())
        self._send(b"".join(piece.text for piece in batch))

    def take(self) -> list[NDArray[Any]]:
        """Waits for the tokens of each piece that was given, (n,) uint32."""
        counts, tokens = (np.frombuffer(self._received(), kind) for kind in (np.int64, np.uint32))
        return np.split(tokens, np.cumsum(counts)[:-1])

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._child.kill()
        self._child.communicate()

    def _send(self, data: bytes) -> None:
        assert self._child.stdin
        try:
            send(self._child.stdin, data)
        except OSError:
            raise _gone() from None

    def _received(self) -> bytes:
        assert self._child.stdout
        data = receive(self._child.stdout)
        if data is None:
            raise _gone()
        return data


def _gone() -> TgenError:
    message = "a process that tokenises has ended"
    return TgenError(message, "it may have lacked memory: with --threads 1 there is none beside")
