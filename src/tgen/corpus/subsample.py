"""Less of a text that is too long: pieces spread evenly over all of it."""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from tgen.corpus.documents import Document, Part, select, sizes

MAX_HELD_OUT_BYTES = 1 << 22  # to score and to keep: more would not make the figure surer
_PIECE = 1 << 18  # bytes
_LINE = 1 << 12  # bytes in which a line's end is looked for first


def subsample(documents: Sequence[Document], max_bytes: int) -> Sequence[Document]:
    """The documents themselves if they are no longer than `max_bytes` together, else every n-th
    piece: a short document whole, a long text in pieces that end with a line where there is one."""
    n_bytes = int(sizes(documents).sum())
    if n_bytes <= max_bytes:
        return documents
    kept, cuts = array("q"), dict[int, tuple[int, int]]()
    passed = taken = 0
    for place, start, end, whole in _pieces(documents, max(1, min(_PIECE, max_bytes))):
        size = end - start
        if taken + size <= (passed + size) * max_bytes / n_bytes:
            if not whole:
                cuts[len(kept)] = (start, end)
            kept.append(place)
            taken += size
        passed += size
    if not kept:
        place, start, end, whole = next(_pieces(documents, max(1, min(_PIECE, max_bytes))))
        kept, cuts = array("q", [place]), {} if whole else {0: (start, end)}
    return select(documents, np.array(kept, np.int64), cuts)


def _pieces(documents: Sequence[Document], most: int) -> Iterator[tuple[int, int, int, bool]]:
    """Of all documents: its place, the piece's first and last byte, and whether that is all."""
    for place, size in enumerate(map(int, sizes(documents))):  # a list of them would be large
        if 0 < size <= most:
            yield place, 0, size, True
            continue
        document = documents[place]
        if len(document) > 1:
            yield place, 0, size, True
            continue
        start = 0
        while start < size:
            end = start + most
            end = size if end >= size else _line_end(document[0], start, end)
            yield place, start, end, False
            start = end


def _line_end(text: Part, start: int, end: int) -> int:
    """The last place up to `end` where a line ends, or the next where a character does."""
    for first in (max(start, end - _LINE), start):
        found = text[first:end].rfind(b"\n")
        if found >= 0:
            return first + found + 1
    while end < len(text) and text[end : end + 1][0] & 0xC0 == 0x80:
        end += 1
    return end
