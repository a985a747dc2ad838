"""The documents to train on, and those held out."""

from typing import NamedTuple

from tgen.corpus.documents import Corpus, Document


class Split(NamedTuple):
    """The documents to train on and those held out; `cut`: the border lies inside a document."""

    train: list[Document]
    held_out: list[Document]
    cut: bool


def split(corpus: Corpus, val_fraction: float) -> Split:
    """The first part to train on and the last `val_fraction` of the bytes, held out.

    A text is cut at that very character; rows are never cut, so the border moves to the nearest
    one's end. Either part may come out empty.
    """
    border = round(corpus.n_bytes * (1 - val_fraction))
    train: list[Document] = []
    held_out: list[Document] = []
    start, cut = 0, False
    for number, document in enumerate(corpus.documents):
        size = sum(map(len, document))
        is_row = number in corpus.rows
        inside = border - start  # bytes of this document before the border
        if inside >= size or (is_row and inside >= size / 2):
            train.append(document)
        elif inside <= 0 or is_row:
            held_out.append(document)
        else:
            (text,) = document
            place = _character_start(text, inside)
            if place > 0:
                train.append((text[:place],))
                cut = True
            held_out.append((text[place:],))
        start += size
    return Split(train, held_out, cut)


def _character_start(text: bytes, position: int) -> int:
    """The nearest place at or before `position` where a UTF-8 character starts."""
    for back in range(min(3, position) + 1):
        if text[position - back] & 0xC0 != 0x80:
            return position - back
    return position
