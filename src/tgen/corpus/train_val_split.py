"""Split a corpus into training and validation documents.

A validation loss on text that is also in the training split says nothing about unseen text, so a
document and its copies go to the same split. The validation split is the end of the corpus, with
copies counted once.
"""

from typing import NamedTuple

import numpy as np

from tgen.corpus.documents import Corpus, Documents, Part


class TrainValSplit(NamedTuple):
    """Training and validation documents.

    With `cuts_document` the boundary is inside a text, whose pieces are the last of `train` and the
    first of `val`.
    """

    train: Documents
    val: Documents
    cuts_document: bool = False
    n_dropped: int = 0  # documents: further copies of validation documents
    dropped_bytes: int = 0


def split_train_val(corpus: Corpus, val_fraction: float) -> TrainValSplit:
    """Split off the last `val_fraction` of the bytes for validation.

    Copies of a document count once for the boundary; all copies of a training document are kept. A
    text is cut at a character; rows are never cut, so the boundary moves to the nearest row's end.
    Either split may be empty.
    """
    documents = corpus.documents
    n_bytes = documents.sizes
    keys = np.frombuffer(documents.table.keys, np.uint64)[documents.numbers]
    _, first_copies, copy_of = np.unique(keys, return_index=True, return_inverse=True)
    is_first = np.zeros(len(n_bytes), bool)
    is_first[first_copies] = True
    unique_bytes = np.where(is_first, n_bytes, 0)
    boundary = round(int(unique_bytes.sum()) * (1 - val_fraction))
    inside = unique_bytes - unique_bytes.cumsum() + boundary  # bytes of each before the boundary
    is_row = documents.table.is_row(documents.numbers)
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
    return TrainValSplit(
        documents.select(train, np.zeros_like(train), train_ends),
        documents.select(val, val_starts, n_bytes[val]),
        cuts_document=cut > 0,
        n_dropped=int((~in_train).sum()) - len(val),
        dropped_bytes=int(n_bytes[~in_train].sum() - n_bytes[val].sum()),
    )


def _character_start(text: Part, position: int) -> int:
    """Return the start of the UTF-8 character that contains `position`."""
    for back in range(min(3, position) + 1):
        if text[position - back : position - back + 1][0] & 0xC0 != 0x80:
            return position - back
    return position
