"""The documents to train on, and those held out.

Held-out text that is also trained on says nothing about unseen text. So a document and its copies
come to the same side of the border: what is held out is the last part of what the corpus says
once.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.documents import Corpus, Document, Documents, Part, select, sizes


class Split(NamedTuple):
    """The documents to train on and those held out; `cut`: the border lies inside a document.

    A cut document's pieces are the last of `train` and the first of `held_out`.
    """

    train: Sequence[Document]
    held_out: Sequence[Document]
    cut: bool = False
    left_out: int = 0  # documents: further copies of what is held out
    left_out_bytes: int = 0


def train_val_split(corpus: Corpus, val_fraction: float) -> Split:
    """The first part to train on and the last `val_fraction` of the bytes, held out; what is there
    several times counts once for the border, and is trained on as often as it is there.

    A text is cut at that very character; rows are never cut, so the border moves to the nearest
    one's end. Either part may come out empty.
    """
    documents = corpus.documents
    n_bytes = sizes(documents)
    order, begins = _copies_together(_keys(documents))
    is_first = np.zeros(len(n_bytes), bool)
    is_first[order[begins]] = True  # of each document's copies
    once = np.where(is_first, n_bytes, 0)
    border = round(int(once.sum()) * (1 - val_fraction))
    inside = once - once.cumsum() + border  # bytes of each before the border
    is_row = np.fromiter((i in corpus.rows for i in range(len(n_bytes))), bool, len(n_bytes))
    before = is_first & ((inside >= n_bytes) | (is_row & (inside >= n_bytes / 2)))
    across = np.flatnonzero(is_first & ~before & ~is_row & (inside > 0))  # one at most
    learnt = np.empty_like(before)
    learnt[order] = before[order[begins]][begins.cumsum() - 1]  # as the first copy is
    train, held_out = np.flatnonzero(learnt), np.flatnonzero(is_first & ~before)
    cut_train, cut_held_out, place = {}, {}, 0
    for number in across.tolist():
        (text,) = documents[number]
        place = _character_start(text, int(inside[number]))
        cut_held_out[0] = (place, len(text))
        if place > 0:
            cut_train[len(train)] = (0, place)
            train = np.append(train, number)
    return Split(
        select(documents, train, cut_train),
        select(documents, held_out, cut_held_out),
        cut=place > 0,
        left_out=int((~learnt).sum()) - len(held_out),
        left_out_bytes=int(n_bytes[~learnt].sum() - n_bytes[held_out].sum()),
    )


def _copies_together(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(n,), (n,): the documents' numbers with those of equal keys next to each other, in order, and
    whether another key begins there."""
    order = np.argsort(keys, kind="stable")
    found = keys[order]
    begins = np.ones(len(keys), bool)
    begins[1:] = found[1:] != found[:-1]
    return order, begins


def _keys(documents: Sequence[Document]) -> NDArray[np.uint64]:
    """(n,): 64 bits that tell different documents from each other."""
    if isinstance(documents, Documents):
        return np.frombuffer(documents.table.keys, np.uint64)[documents.numbers]
    digests = (hashlib.sha256(_unlike(document)).digest()[:8] for document in documents)
    return np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)


def _unlike(document: Document) -> bytes:
    """Its bytes, the borders of its parts included."""
    return b"".join(len(part).to_bytes(8, "little") + part[:] for part in document)


def _character_start(text: Part, position: int) -> int:
    """The nearest place at or before `position` where a UTF-8 character starts."""
    for back in range(min(3, position) + 1):
        if text[position - back : position - back + 1][0] & 0xC0 != 0x80:
            return position - back
    return position
