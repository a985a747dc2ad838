"""The documents to train on, and those held out.

Held-out text that is also trained on says nothing about unseen text. So a document and its copies
come to the same side of the border: what is held out is the last part of what the corpus says
once.
"""

from typing import NamedTuple

from tgen.corpus.documents import Corpus, Document, size


class Split(NamedTuple):
    """The documents to train on and those held out; `cut`: the border lies inside a document.

    A cut document's pieces are the last of `train` and the first of `held_out`.
    """

    train: list[Document]
    held_out: list[Document]
    cut: bool = False
    left_out: int = 0  # documents: further copies of what is held out
    left_out_bytes: int = 0


def split(corpus: Corpus, val_fraction: float) -> Split:
    """The first part to train on and the last `val_fraction` of the bytes, held out; what is there
    several times counts once for the border, and is trained on as often as it is there.

    A text is cut at that very character; rows are never cut, so the border moves to the nearest
    one's end. Either part may come out empty.
    """
    first: dict[Document, int] = {}
    for number, document in enumerate(corpus.documents):
        first.setdefault(document, number)
    border = round(sum(size(document) for document in first) * (1 - val_fraction))
    known: set[Document] = set()
    beginning: list[Document] = []
    held_out: list[Document] = []
    start = 0
    for document, number in first.items():
        is_row = number in corpus.rows
        inside = border - start  # bytes of this document before the border
        if inside >= size(document) or (is_row and inside >= size(document) / 2):
            known.add(document)
        elif inside <= 0 or is_row:
            held_out.append(document)
        else:
            (text,) = document
            place = _character_start(text, inside)
            beginning = [(text[:place],)] if place > 0 else []
            held_out.append((text[place:],))
        start += size(document)
    unknown = [document for document in corpus.documents if document not in known]
    return Split(
        [document for document in corpus.documents if document in known] + beginning,
        held_out,
        cut=bool(beginning),
        left_out=len(unknown) - len(held_out),
        left_out_bytes=sum(map(size, unknown)) - sum(map(size, beginning + held_out)),
    )


def _character_start(text: bytes, position: int) -> int:
    """The nearest place at or before `position` where a UTF-8 character starts."""
    for back in range(min(3, position) + 1):
        if text[position - back] & 0xC0 != 0x80:
            return position - back
    return position
