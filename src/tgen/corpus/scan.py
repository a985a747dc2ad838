"""Read sources once from start to end: find document boundaries and fingerprint the documents.

Only a few megabytes are in RAM at a time, except for a JSON row, which is read whole.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tgen.corpus.documents import Corpus, DocumentTable, document_size, parse_row
from tgen.corpus.sources import Source, open_sources
from tgen.errors import CorpusError
from tgen.tokenizer import END_OF_TEXT

_SEPARATOR = END_OF_TEXT.encode()
_BLOCK = 1 << 22  # bytes per read


def read(paths: Sequence[str]) -> Corpus:
    """Read files, directories, glob patterns and `-` (stdin); CorpusError if all are empty."""
    skipped: list[str] = []
    table, fingerprint = DocumentTable(), hashlib.sha256()
    for source in open_sources(paths, skipped):
        rows = _contains_rows(source)
        table.add_source(source, rows=rows)
        for start, end, n_bytes, content in _find_rows(source) if rows else _find_texts(source):
            own = hashlib.sha256()
            for block in content:
                own.update(block)
                fingerprint.update(block)
            fingerprint.update(b"\xff" * 8)
            table.add_document(start, end, n_bytes, int.from_bytes(own.digest()[:8], "little"))
        source.close()
    corpus = Corpus(table.all_documents(), skipped, fingerprint.hexdigest())
    if corpus.n_bytes == 0:
        raise CorpusError(f"the corpus {' '.join(paths)!r} is empty", "name a file with text")
    return corpus


# Start and end of a document in its source, bytes of its parts, and the content to fingerprint.
_Location = tuple[int, int, int, Iterable[bytes]]


def _find_texts(source: Source) -> Iterator[_Location]:
    """Find the documents of a text file: one, or several separated by end-of-text tokens."""
    position = 0
    while block := source.read(position, _BLOCK):
        if len(block) == _BLOCK:
            last = block.rfind(_SEPARATOR)
            if last < 0:
                end = _find_separator(source, position + _BLOCK - len(_SEPARATOR) + 1)
                if any(not part.isspace() for part in _read_blocks(source, position, end)):
                    n = end - position
                    content = chain([_encode_length(n)], _read_blocks(source, position, end))
                    yield position, end, n, content
                position = end + len(_SEPARATOR)
                continue
            block = block[:last]
        for text in block.split(_SEPARATOR):
            end = position + len(text)
            if text.strip():
                yield position, end, len(text), (_encode_length(len(text)), text)
            position = end + len(_SEPARATOR)


def _find_separator(source: Source, position: int) -> int:
    """Return the position of the next end-of-text token, or of the end of the source."""
    while block := source.read(position, _BLOCK):
        offset = block.find(_SEPARATOR)
        if offset >= 0:
            return position + offset
        position += max(1, len(block) - len(_SEPARATOR) + 1) if len(block) == _BLOCK else len(block)
    return position


def _read_blocks(source: Source, start: int, end: int) -> Iterator[bytes]:
    for position in range(start, end, _BLOCK):
        n = min(_BLOCK, end - position)
        block = source.read(position, n)
        if len(block) < n:
            raise source.changed_error()
        yield block


def _find_rows(source: Source) -> Iterator[_Location]:
    for number, (start, line) in enumerate(_read_lines(source), 1):
        if line.strip():
            line = line.rstrip(b"\r\n")
            parts = parse_row(line)
            if parts is None:
                raise CorpusError(
                    f"{source.name}, line {number}: not a valid row "
                    f"(got {line[:50].decode(errors='replace')!r})",
                    'each line must be {"text": "..."} or {"prompt": "...", "completion": "..."}',
                )
            content = chain.from_iterable((_encode_length(len(part)), part) for part in parts)
            yield start, start + len(line), document_size(parts), content


def _read_lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its line break, and its start."""
    start = position = 0
    unfinished: list[bytes] = []  # joined once: a long line takes many reads
    while block := source.read(position, _BLOCK):
        position += len(block)
        end = block.rfind(b"\n") + 1
        if not end:
            unfinished.append(block)
            continue
        lines, unfinished = b"".join([*unfinished, block[:end]]), [block[end:]]
        for line in lines.splitlines(keepends=True):
            yield start, line
            start += len(line)
    for line in b"".join(unfinished).splitlines(keepends=True):
        yield start, line
        start += len(line)


def _contains_rows(source: Source) -> bool:
    if source.name != "-":
        return source.name.endswith((".jsonl", ".ndjson"))
    position = 0
    while (block := source.read(position, _BLOCK)).isspace():
        position += len(block)
    position += len(block) - len(block.lstrip())
    return parse_row(source.read(position, 1 << 20).split(b"\n", 1)[0]) is not None


def _encode_length(n: int) -> bytes:
    return n.to_bytes(8, "little")
