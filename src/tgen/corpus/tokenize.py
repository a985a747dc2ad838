"""Documents -> tokens, in a stream: what is in memory does not grow with the text.

A text is encoded in pieces of a few megabytes. They end where no token goes on, with a line; where
there is no such place, with another line, a word or a character, and but for the token that would
have lain across, the tokens are those of the whole text.
"""

import re
from collections.abc import Generator, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.config import LossOn
from tgen.corpus.documents import Document, Part
from tgen.corpus.parallel_tokenize import Piece, encoded
from tgen.storage import files
from tgen.storage.disk_array import IN_MEMORY, Array, DiskArray
from tgen.tokenizer import Tokenizer

_PIECE = 1 << 21  # bytes; the library takes a hundred times as much where a token is a character
_NEAR = 1 << 16  # bytes at a piece's end in which it is cut if that is possible
_CUTS = (  # from those that change no token to those that may change one
    re.compile(rb"\n(?=\S)"),
    re.compile(rb"\n(?=[^\r\n])"),
    re.compile(rb"[A-Za-z](?= [A-Za-z])"),
)


class TokenizedCorpus(NamedTuple):
    """Documents as tokens, and what of them the loss counts."""

    tokens: Array  # (n,) uint16 or uint32
    scored: Array | None  # (n,) bool; None: every token
    scored_bytes: int  # of the text whose tokens are scored


def tokenize(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    loss_on: LossOn = "completion",
    open_end: bool = False,
) -> TokenizedCorpus:
    """All documents in one array, an end-of-text token after each where the tokenizer has one; with
    `open_end` not after the last, which goes on elsewhere.

    With a loss on the completion a document's last part and the token that ends it are scored, so
    of a text all. A completion's bits per byte are thus over the bytes of completions alone.
    """
    steps = tokenising(documents, tokenizer, loss_on=loss_on, open_end=open_end)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: TokenizedCorpus = end.value
            return found


def tokenising(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    loss_on: LossOn = "completion",
    open_end: bool = False,
    folder: Path | None = None,
    processes: int = 1,
) -> Generator[int, None, TokenizedCorpus]:
    """As `tokenize`; yields now and then how many bytes are done. Arrays that are too long for the
    memory go to files without a name in `folder` (None: where temporary files go). The tokens are
    the same with any number of `processes`, which pay for large texts."""
    kind = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    tokens, mask = _Growing(kind, folder), _Mask(folder)
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], kind)
    done = scored_bytes = 0
    ended = True
    for piece, ids in encoded(_apart(documents, loss_on), tokenizer, processes=processes):
        if piece.begins and not ended:
            tokens.add(end)
            mask.add(True, len(end))
        ended = False
        tokens.add(ids.astype(kind))
        mask.add(piece.scored, len(ids))
        scored_bytes += len(piece.text) if piece.scored else 0
        done += len(piece.text)
        if piece.text:
            yield done
    if not ended and not open_end:
        tokens.add(end)
        mask.add(True, len(end))
    return TokenizedCorpus(tokens.array(), mask.array(), scored_bytes)


def _apart(documents: Iterable[Document], loss_on: LossOn) -> Iterator[Piece]:
    """What is tokenised apart, of each document at least one piece, which may be empty."""
    for document in documents:
        begins = True
        for number, part in enumerate(document or (b"",), 1):
            scored = loss_on == "all" or number >= len(document)
            for text in pieces(part, _PIECE) if len(part) else [b""]:
                yield Piece(text, begins, scored)
                begins = False


def arrays(train: TokenizedCorpus, held_out: TokenizedCorpus) -> dict[str, Array]:
    """What a TokenStore is made of, by its fields' names; no mask where everything is scored."""
    found = {
        "train": train.tokens,
        "held_out": held_out.tokens,
        "train_scored": train.scored,
        "held_out_scored": held_out.scored,
    }
    return {name: array for name, array in found.items() if array is not None}


def pieces(text: Part, size: int) -> Iterator[bytes]:
    """A text in parts of up to `size` bytes that are tokenised apart; see above for where."""
    start = 0
    while start < len(text):
        piece = text[start : start + size + 4]  # to see what character follows
        if len(piece) > size:
            piece = piece[: _place(piece, size)]
        yield piece
        start += len(piece)


def _place(text: bytes, most: int) -> int:
    """Where to cut a text at the latest, after `most` bytes."""
    for pattern, first in product(_CUTS, (max(0, most - _NEAR), 0)):
        places = [match.end() for match in pattern.finditer(text, first, most + 1)]
        for place in reversed(places):
            if pattern is not _CUTS[0] or _visible(text, place):
                return place
    return next((most - i for i in range(min(4, most)) if text[most - i] & 0xC0 != 0x80), most)


def _visible(text: bytes, place: int) -> bool:
    """Whether a character that is no white space begins there."""
    following = text[place : place + 4].decode("utf-8", errors="surrogateescape")
    return not following[:1].isspace()


class _Growing:
    """An array that is added to; once it is long it goes on in a file."""

    def __init__(self, kind: np.dtype[Any], folder: Path | None) -> None:
        self._kind, self._folder = kind, folder
        self._held = bytearray()  # rather than arrays, of which there may be millions
        self._file: files.ByPosition | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, array: NDArray[Any]) -> None:
        """Puts this after what is there."""
        self._length += len(array)
        self._held += array.data
        if len(self._held) > IN_MEMORY:
            self._file = self._file or files.temporary(self._folder)
            self._write(self._file)

    def array(self) -> Array:
        """All of it; nothing can be added any more."""
        if self._file is None:
            return np.frombuffer(self._held, self._kind)
        self._write(self._file)
        return DiskArray(self._file, 0, self._length, self._kind)

    def _write(self, file: files.ByPosition) -> None:
        file.append(self._held)
        self._held = bytearray()


class _Mask:
    """What is scored: nothing is kept as long as everything is."""

    def __init__(self, folder: Path | None) -> None:
        self._flags = _Growing(np.dtype(np.bool_), folder)
        self._n_true = 0
        self._all = True

    def add(self, scored: bool, n: int) -> None:
        """The next `n` tokens are or are not."""
        if self._all and scored:
            self._n_true += n
            return
        if self._all:
            self._all = False
            for start in range(0, self._n_true, _PIECE):
                self._flags.add(np.ones(min(_PIECE, self._n_true - start), np.bool_))
        self._flags.add(np.full(n, scored))

    def array(self) -> Array | None:
        """(n,) bool; None: everything is scored."""
        return None if self._all else self._flags.array()
