"""Split a corpus into training and validation documents, and subsample a long one.

A validation loss on text that is also in the training set says nothing about unseen text, so a
document and its copies go to the same split. The validation set is the end of the corpus, with
copies counted once; of conversations it is a random part, since their order may mean something.
A subsample consists of pieces spread evenly over the whole text.
"""

from array import array
from collections.abc import Iterator

import numpy as np

from tgen.corpus.document_table import Corpus, Documents, Part

_MIN_VAL_ROWS, _MAX_VAL_ROWS = 8, 500  # fewer say little, more take time at each evaluation
MAX_VAL_BYTES = 1 << 22  # a larger validation set would not make the loss more certain
_PIECE = 1 << 18  # bytes of the text that a subsample takes in one place,
_MIN_PIECE = 1 << 12  # or fewer, so that a small one has
PIECES = 64  # at least: a text is not the same everywhere
_WHOLE_PIECES = 8  # at least, of documents that are not cut
_LINE = 1 << 12  # bytes searched first for a line break


def split_train_val(corpus: Corpus, val_fraction: float) -> tuple[Documents, Documents]:
    """Return training documents, and the last `val_fraction` of the bytes for validation.

    Copies of a document count once for the boundary; all copies of a training document are kept. A
    text is cut at a character, and its pieces are the last of the one and the first of the other;
    rows are never cut, so the boundary moves to the nearest row's end. Either split may be empty.
    """
    documents = corpus.documents
    n_bytes = documents.sizes
    keys = documents.keys
    _, first_copies, copy_of = np.unique(keys, return_index=True, return_inverse=True)
    is_first = np.zeros(len(n_bytes), bool)
    is_first[first_copies] = True
    unique_bytes = np.where(is_first, n_bytes, 0)
    boundary = round(int(unique_bytes.sum()) * (1 - val_fraction))
    inside = unique_bytes - unique_bytes.cumsum() + boundary  # bytes of each before the boundary
    is_row = documents.is_row
    before = is_first & ((inside >= n_bytes) | (is_row & (inside >= n_bytes / 2)))
    across = np.flatnonzero(is_first & ~before & ~is_row & (inside > 0))  # one at most
    in_train = before[first_copies][copy_of]
    train, val = np.flatnonzero(in_train), np.flatnonzero(is_first & ~before)
    cut, train_ends, val_starts = 0, n_bytes[train], np.zeros_like(val)
    for number in across.tolist():
        (text,) = documents[number]
        cut = val_starts[0] = _character_start(text, int(inside[number]))
        if cut > 0:
            train, train_ends = np.append(train, number), np.append(train_ends, cut)
    return (
        documents.select(train, np.zeros_like(train), train_ends, open_end=cut > 0),
        documents.select(val, val_starts, n_bytes[val]),
    )


def count_dropped(corpus: Corpus, train: Documents, val: Documents) -> tuple[int, int]:
    """Return the number of documents in neither split, which are further copies of validation
    documents, and their bytes."""
    n_documents = len(corpus.documents) + train.open_end - len(train) - len(val)
    return n_documents, corpus.n_bytes - train.n_bytes - val.n_bytes


def _character_start(text: Part, position: int) -> int:
    """Return the start of the UTF-8 character that contains `position`."""
    for back in range(min(3, position) + 1):
        if text[position - back : position - back + 1][0] & 0xC0 != 0x80:
            return position - back
    return position


def split_rows(corpus: Corpus, val_fraction: float) -> tuple[Documents, Documents]:
    """Return rows to train on, and held-out ones: `val_fraction` of them, from 8 to 500 but at most
    a quarter.

    Rows are held out by a hash of their content, so neither their order nor rows added later change
    much, and copies are in the same split. Either split may be empty.
    """
    documents = corpus.documents
    n_bytes = documents.sizes
    keys = documents.keys
    unique, first_copies = np.unique(keys, return_index=True)  # in the order of the hashes
    n_val = round(len(unique) * val_fraction)
    if n_val:
        n_val = min(max(_MIN_VAL_ROWS, n_val), _MAX_VAL_ROWS, len(unique) // 4)
    is_val = np.isin(keys, unique[:n_val])
    train, val = np.flatnonzero(~is_val), np.sort(first_copies[:n_val])
    return (
        documents.select(train, np.zeros_like(train), n_bytes[train]),
        documents.select(val, np.zeros_like(val), n_bytes[val]),
    )


def subsample_documents(documents: Documents, max_bytes: int, *, n_pieces: int = 1) -> Documents:
    """Return evenly spread pieces of `max_bytes` in total, or `documents` itself if not longer.

    A short document is one piece; a long text is cut after line breaks where possible, into about
    `n_pieces` or more.
    """
    n_bytes = documents.n_bytes
    if n_bytes <= max_bytes:
        return documents
    selected = array("q")  # index, start and end of each piece
    n_seen = n_taken = 0
    size = max(1, min(_PIECE, max_bytes, max(_MIN_PIECE, max_bytes // n_pieces)))
    whole = max(size, min(_PIECE, max_bytes // _WHOLE_PIECES))
    for index, start, end in _pieces(documents, size, whole):
        n_seen += end - start
        if n_taken + end - start <= n_seen * max_bytes / n_bytes:
            selected.extend((index, start, end))
            n_taken += end - start
    if not selected:
        selected.extend(next(_pieces(documents, size, whole)))
    return documents.select(*np.array(selected, np.int64).reshape(-1, 3).T)


def _pieces(documents: Documents, max_size: int, whole: int) -> Iterator[tuple[int, int, int]]:
    """Yield the document index, start and end of each piece; documents up to `whole` are one."""
    for index, size in enumerate(map(int, documents.sizes)):  # a list would be large
        if 0 < size <= whole or len(document := documents[index]) > 1:
            yield index, 0, size
            continue
        start = 0
        while start < size:
            end = start + max_size
            end = size if end >= size else _piece_end(document[0], start, end)
            yield index, start, end
            start = end


def _piece_end(text: Part, start: int, end: int) -> int:
    """Return the position after the last line break up to `end`, or else the next character."""
    for first in (max(start, end - _LINE), start):
        offset = text[first:end].rfind(b"\n")
        if offset >= 0:
            return first + offset + 1
    while end < len(text) and text[end : end + 1][0] & 0xC0 == 0x80:
        end += 1
    return end
