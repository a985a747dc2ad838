"""Tokenize documents as a stream: memory use does not grow with the corpus.

A text is encoded in pieces of a few megabytes, cut at a line break that no token crosses or,
if none exists, at another line break, a word or a character. Except for a token that crosses such a
cut, the tokens are those of the whole text.
"""

import re
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.config.training import LossOn
from tgen.corpus.dataset import Tokens
from tgen.corpus.document_table import Document, Part
from tgen.corpus.parallel_tokenize import Piece, encode_pieces
from tgen.storage import files
from tgen.storage.disk_array import IN_MEMORY, Array, DiskArray
from tgen.tokenizer import Tokenizer

_PIECE = 1 << 21  # bytes; the library uses a hundred times as much if each character is a token
_SEARCH = 1 << 16  # bytes at a piece's end in which a cut is searched first
_CUTS = (  # from cuts that change no token to those that may change one
    re.compile(rb"\n(?=\S)"),
    re.compile(rb"\n(?=[^\r\n])"),
    re.compile(rb"[A-Za-z](?= [A-Za-z])"),
)


def tokenize_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    loss_on: LossOn = "completion",
    begin_ids: Sequence[int] = (),
    open_end: bool = False,
    folder: Path | None = None,
    processes: int = 1,
    on_ranks: bool = False,
) -> Generator[int, None, tuple[Tokens, int, int]]:
    """Concatenate the tokens of all documents, each after `begin_ids` and followed by an
    end-of-text token if there is one; with `open_end` the last one is not, since it continues in
    the other split.

    Yields the number of bytes done; returns the tokens, the bytes of the text whose tokens are in
    the loss, and the number of characters that the tokenizer cannot express, replaced by U+FFFD.
    With `loss_on="completion"` the loss mask covers the last part of a document and its end-of-text
    token, and so all of a text. Arrays too large for RAM go to unnamed files in `folder` (None: the
    system's directory for temporary files). The number of `processes` does not change the tokens,
    nor does `on_ranks` (see `encode_pieces`).
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    tokens = ArrayBuilder(dtype, folder)
    runs = array("q")  # numbers of tokens, negative if they are not in the loss
    begin = np.array(begin_ids, dtype)
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype)
    done = target_bytes = n_replaced = 0
    ended = True
    pieces = split_documents(documents, loss_on)
    encoded = encode_pieces(pieces, tokenizer, processes=processes, on_ranks=on_ranks)
    for piece, ids, n in encoded:
        if piece.starts_document and not ended:
            tokens.append(end)
            runs.append(len(end))
        ended = False
        if piece.starts_document and len(begin):
            tokens.append(begin)
            runs.append(len(begin) if piece.in_loss else -len(begin))
        tokens.append(ids.astype(dtype))
        n_replaced += n
        runs.append(len(ids) if piece.in_loss else -len(ids))
        target_bytes += len(piece.text) if piece.in_loss else 0
        done += len(piece.text)
        if piece.text:
            yield done
    if not ended and not open_end:
        tokens.append(end)
        runs.append(len(end))
    return Tokens(tokens.build(), _build_mask(runs, folder)), target_bytes, n_replaced


def begin_of_document(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens before each document: those that the model saw before a text, unless that
    is the end-of-text token, which is there already."""
    return () if tokenizer.bos_ids == (tokenizer.end_of_text,) else tokenizer.bos_ids


def split_documents(
    documents: Iterable[Document], loss_on: LossOn = "completion"
) -> Iterator[Piece]:
    """Yield at least one piece per document, which may be empty."""
    for document in documents:
        starts_document = True
        for number, part in enumerate(document or (b"",), 1):
            in_loss = loss_on == "all" or number >= len(document)
            for text in split_text(part, _PIECE) if len(part) else [b""]:
                yield Piece(text, starts_document, in_loss)
                starts_document = False


def split_text(text: Part, size: int) -> Iterator[bytes]:
    """Split a text into pieces of up to `size` bytes that are tokenized separately."""
    start = 0
    while start < len(text):
        piece = text[start : start + size + 4]  # with the character that follows
        if len(piece) > size:
            piece = piece[: _cut_position(piece, size)]
        yield piece
        start += len(piece)


def split_stream(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    """Split a text that is read once into the pieces of `split_text`; `read` returns up to n
    bytes, and b"" at the end."""
    text = b""
    while True:
        while len(text) < size + 4 and (block := read(size + 4 - len(text))):
            text += block
        if not text:
            return
        end = _cut_position(text, size) if len(text) > size else len(text)
        yield text[:end]
        text = text[end:]


def _cut_position(text: bytes, max_size: int) -> int:
    """Return the last position up to `max_size` where a cut changes the fewest tokens."""
    for pattern, first in product(_CUTS, (max(0, max_size - _SEARCH), 0)):
        positions = [match.end() for match in pattern.finditer(text, first, max_size + 1)]
        for position in reversed(positions):
            if pattern is not _CUTS[0] or _is_visible(text, position):
                return position
    character_starts = (
        max_size - i for i in range(min(4, max_size)) if text[max_size - i] & 0xC0 != 0x80
    )
    return next(character_starts, max_size)


def _is_visible(text: bytes, position: int) -> bool:
    """Return whether the character at `position` is not whitespace, as Unicode defines it."""
    following = text[position : position + 4].decode("utf-8", errors="surrogateescape")
    return not following[:1].isspace()


class ArrayBuilder:
    """An array that grows; a long one continues in a file."""

    def __init__(self, dtype: np.dtype[Any], folder: Path | None) -> None:
        self._dtype, self._folder = dtype, folder
        self._buffer = bytearray()  # not a list of arrays: there may be millions
        self._file: files.RandomAccessFile | None = None
        self._length = 0

    def append(self, values: NDArray[Any]) -> None:
        """Add values of the array's dtype."""
        self._length += len(values)
        self._buffer += values.data
        if len(self._buffer) > IN_MEMORY:
            self._file = self._file or files.open_temporary(self._folder)
            self._flush(self._file)

    def build(self) -> Array:
        """Return the array; nothing can be appended any more."""
        if self._file is None:
            return np.frombuffer(self._buffer, self._dtype)
        self._flush(self._file)
        return DiskArray(self._file, 0, self._length, self._dtype)

    def _flush(self, file: files.RandomAccessFile) -> None:
        file.append(self._buffer)
        self._buffer = bytearray()


def _build_mask(runs: Iterable[int], folder: Path | None) -> Array | None:
    """(n,) bool; None: every token is in the loss."""
    if min(runs, default=0) >= 0:
        return None
    mask = ArrayBuilder(np.dtype(np.bool_), folder)
    for run in runs:
        mask.append(np.full(abs(run), run > 0))
    return mask.build()
