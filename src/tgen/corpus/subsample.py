"""Subsample a long corpus: pieces spread evenly over all of it."""

from array import array
from collections.abc import Iterator

import numpy as np

from tgen.corpus.documents import Documents, Part

MAX_VAL_BYTES = 1 << 22  # a larger validation split would not make the loss more certain
_PIECE = 1 << 18  # bytes
_LINE = 1 << 12  # bytes searched first for a line break


def subsample_documents(documents: Documents, max_bytes: int) -> Documents:
    """Return evenly spread pieces of `max_bytes` in all, or `documents` itself if not longer.

    A short document is one piece; a long text is cut after line breaks where possible.
    """
    n_bytes = documents.n_bytes
    if n_bytes <= max_bytes:
        return documents
    indices, spans = array("q"), dict[int, tuple[int, int]]()
    n_seen = n_taken = 0
    for index, start, end, whole in _pieces(documents, max(1, min(_PIECE, max_bytes))):
        size = end - start
        if n_taken + size <= (n_seen + size) * max_bytes / n_bytes:
            if not whole:
                spans[len(indices)] = (start, end)
            indices.append(index)
            n_taken += size
        n_seen += size
    if not indices:
        index, start, end, whole = next(_pieces(documents, max(1, min(_PIECE, max_bytes))))
        indices, spans = array("q", [index]), {} if whole else {0: (start, end)}
    return documents.select(np.array(indices, np.int64), spans)


def _pieces(documents: Documents, max_size: int) -> Iterator[tuple[int, int, int, bool]]:
    """Yield each piece's document index, start and end, and whether it is the whole document."""
    for index, size in enumerate(map(int, documents.sizes)):  # a list would be large
        if 0 < size <= max_size or len(document := documents[index]) > 1:
            yield index, 0, size, True
            continue
        start = 0
        while start < size:
            end = start + max_size
            end = size if end >= size else _piece_end(document[0], start, end)
            yield index, start, end, False
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
