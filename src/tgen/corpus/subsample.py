"""Subsample a long corpus: pieces spread evenly over all of it."""

from array import array
from collections.abc import Iterator

import numpy as np

from tgen.corpus.documents import Documents, Part

MAX_VAL_BYTES = 1 << 22  # a larger validation split would not make the loss more certain
_PIECE = 1 << 18  # bytes
_LINE = 1 << 12  # bytes searched first for a line break


def subsample_documents(documents: Documents, max_bytes: int) -> Documents:
    """Return evenly spread pieces of `max_bytes` in total, or `documents` itself if not longer.

    A short document is one piece; a long text is cut after line breaks where possible.
    """
    n_bytes = documents.n_bytes
    if n_bytes <= max_bytes:
        return documents
    selected = array("q")  # index, start and end of each piece
    n_seen = n_taken = 0
    for index, start, end in _pieces(documents, max_bytes):
        n_seen += end - start
        if n_taken + end - start <= n_seen * max_bytes / n_bytes:
            selected.extend((index, start, end))
            n_taken += end - start
    if not selected:
        selected.extend(next(_pieces(documents, max_bytes)))
    return documents.select(*np.array(selected, np.int64).reshape(-1, 3).T)


def _pieces(documents: Documents, max_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield the document index, start and end of each piece."""
    max_size = max(1, min(_PIECE, max_bytes))
    for index, size in enumerate(map(int, documents.sizes)):  # a list would be large
        if 0 < size <= max_size or len(document := documents[index]) > 1:
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
