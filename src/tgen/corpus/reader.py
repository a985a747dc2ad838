"""Sources read once from beginning to end: where their documents lie, and what tells them apart.

No more than a few megabytes are in memory, but for a single row of JSON, which is read whole.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from tgen.corpus.documents import Corpus, Documents, Table, row, size
from tgen.corpus.sources import Source, sources
from tgen.errors import CorpusError
from tgen.tokenizer import END_OF_TEXT

_BORDER = END_OF_TEXT.encode()
_BLOCK = 1 << 22  # bytes that are read together


def read(paths: Sequence[str]) -> Corpus:
    """Reads files, folders, glob patterns and `-` (stdin); raises CorpusError where nothing is."""
    skipped: list[str] = []
    table, fingerprint = Table(), hashlib.sha256()
    for source in sources(paths, skipped):
        rows = _holds_rows(source)
        table.begin(source, rows=rows)
        for start, end, n_bytes, content in _rows(source) if rows else _texts(source):
            own = hashlib.sha256()
            for block in content:
                own.update(block)
                fingerprint.update(block)
            fingerprint.update(b"\xff" * 8)
            table.add(start, end, n_bytes, int.from_bytes(own.digest()[:8], "little"))
        source.close()
    documents = Documents(table, np.arange(len(table)))
    corpus = Corpus(documents, table, skipped, fingerprint.hexdigest())
    if corpus.n_bytes == 0:
        raise CorpusError(f"the corpus {' '.join(paths)!r} is empty", "name a file that holds text")
    return corpus


# A document's first and last byte in its source, its bytes, and what its fingerprint is made of.
_Found = tuple[int, int, int, Iterable[bytes]]


def _texts(source: Source) -> Iterator[_Found]:
    """A text file is one document, or several with written-out end-of-text tokens between."""
    position = 0
    while block := source.read(position, _BLOCK):
        if len(block) == _BLOCK:
            last = block.rfind(_BORDER)
            if last < 0:
                end = _next_border(source, position + _BLOCK - len(_BORDER) + 1)
                if any(not part.isspace() for part in _blocks(source, position, end)):
                    n = end - position
                    yield position, end, n, chain([_length(n)], _blocks(source, position, end))
                position = end + len(_BORDER)
                continue
            block = block[:last]
        for text in block.split(_BORDER):
            end = position + len(text)
            if text.strip():
                yield position, end, len(text), (_length(len(text)), text)
            position = end + len(_BORDER)


def _next_border(source: Source, position: int) -> int:
    """Where the next end of text begins, or the source ends."""
    while block := source.read(position, _BLOCK):
        found = block.find(_BORDER)
        if found >= 0:
            return position + found
        position += max(1, len(block) - len(_BORDER) + 1) if len(block) == _BLOCK else len(block)
    return position


def _blocks(source: Source, start: int, end: int) -> Iterator[bytes]:
    for position in range(start, end, _BLOCK):
        n = min(_BLOCK, end - position)
        block = source.read(position, n)
        if len(block) < n:
            raise source.changed()
        yield block


def _rows(source: Source) -> Iterator[_Found]:
    for number, (start, line) in enumerate(_lines(source), 1):
        if line.strip():
            line = line.rstrip(b"\r\n")
            parts = row(line)
            if parts is None:
                begin = line[:50].decode(errors="replace")
                raise CorpusError(
                    f"{source.name}, line {number} is no row of text: {begin!r}",
                    'each line must be {"text": "..."} or {"prompt": "...", "completion": "..."}',
                )
            content = chain.from_iterable((_length(len(part)), part) for part in parts)
            yield start, start + len(line), size(parts), content


def _lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """Each line with its end, and where it begins."""
    start = position = 0
    held: list[bytes] = []  # of a line that has not ended: a long one is put together once
    while block := source.read(position, _BLOCK):
        position += len(block)
        end = block.rfind(b"\n") + 1
        if not end:
            held.append(block)
            continue
        whole, held = b"".join([*held, block[:end]]), [block[end:]]
        for line in whole.splitlines(keepends=True):
            yield start, line
            start += len(line)
    for line in b"".join(held).splitlines(keepends=True):
        yield start, line
        start += len(line)


def _holds_rows(source: Source) -> bool:
    if source.name != "-":
        return source.name.endswith((".jsonl", ".ndjson"))
    position = 0
    while (block := source.read(position, _BLOCK)).isspace():
        position += len(block)
    position += len(block) - len(block.lstrip())
    return row(source.read(position, 1 << 20).split(b"\n", 1)[0]) is not None


def _length(n: int) -> bytes:
    return n.to_bytes(8, "little")
