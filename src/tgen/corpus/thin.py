"""Less of a text that is too long: pieces spread evenly over all of it."""

from collections.abc import Sequence

from tgen.corpus.documents import Document

MAX_HELD_OUT_BYTES = 1 << 22  # to score and to keep: more would not make the figure surer
_PIECE = 1 << 18  # bytes


def thin(documents: Sequence[Document], max_bytes: int) -> Sequence[Document]:
    """The documents themselves if they are no longer than `max_bytes` together, else every n-th
    piece: a short document whole, a long text in pieces that end with a line where there is one."""
    n_bytes = sum(len(part) for document in documents for part in document)
    if n_bytes <= max_bytes:
        return documents
    pieces: list[Document] = []
    for document in documents:
        if len(document) == 1:
            pieces += [(piece,) for piece in _pieces(document[0], max(1, min(_PIECE, max_bytes)))]
        else:
            pieces.append(document)
    kept: list[Document] = []
    passed = taken = 0
    for piece in pieces:
        size = sum(map(len, piece))
        if taken + size <= (passed + size) * max_bytes / n_bytes:
            kept.append(piece)
            taken += size
        passed += size
    return kept or pieces[:1]


def _pieces(text: bytes, size: int) -> list[bytes]:
    found, start = [], 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = (text.rfind(b"\n", start, end) + 1) or _character_end(text, end)
        found.append(text[start:end])
        start = end
    return found


def _character_end(text: bytes, position: int) -> int:
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position += 1
    return position
