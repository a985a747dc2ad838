"""Read sources once from start to end: find document boundaries and fingerprint the documents.

Only a few megabytes are in RAM at a time, except for a JSON row, which is read whole.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain

from tgen.corpus.documents import Corpus, DocumentTable
from tgen.corpus.jsonl import (
    Location,
    contains_conversations,
    contains_rows,
    encode_length,
    find_conversations,
    find_rows,
    misnamed_rows_hint,
)
from tgen.corpus.sources import Source, open_sources
from tgen.errors import CorpusError
from tgen.tokenizer import END_OF_TEXT

_SEPARATOR = END_OF_TEXT.encode()
_BLOCK = 1 << 22  # bytes per read


def read(
    paths: Sequence[str],
    *,
    chat: bool = False,
    mixed_hint: str = "train on one of them first, then on the other with --from",
) -> Corpus:
    """Read files, directories, glob patterns and `-` (stdin); CorpusError if all are empty.

    JSONL files whose first row has messages, or with `chat` all, contain conversations; they are an
    error beside other text, with `mixed_hint`.
    """
    skipped: list[str] = []
    misnamed: dict[str, str] = {}
    n_nonempty = 0
    table, fingerprint = DocumentTable(), hashlib.sha256()
    text_name = chat_name = ""  # of the first source of this kind
    for source in open_sources(paths, skipped):
        rows = contains_rows(source)
        chats = rows and (chat or contains_conversations(source))
        if hint := misnamed_rows_hint(source):
            misnamed[source.name] = hint
        if source.read(0, 1):
            n_nonempty += 1
            text_name = text_name or ("" if chats else source.name)
            chat_name = chat_name or (source.name if chats else "")
        table.add_source(source, rows=rows, chats=chats)
        find = find_conversations if chats else find_rows if rows else _find_texts
        try:
            for start, end, n_bytes, content in find(source):
                own = hashlib.sha256()
                for block in content:
                    own.update(block)
                    fingerprint.update(block)
                fingerprint.update(b"\xff" * 8)
                table.add_document(start, end, n_bytes, int.from_bytes(own.digest()[:8], "little"))
        finally:
            source.close()
    if chat_name and text_name:
        raise CorpusError(
            f"{chat_name} has conversations, {text_name} has not",
            mixed_hint,
        )
    if chat and text_name:
        raise CorpusError(
            f"--chat: {text_name} has no conversations",
            misnamed.get(text_name)
            or "remove --chat, or write one JSON object per line into a .jsonl file",
        )
    corpus = Corpus(
        table.all_documents(), skipped, fingerprint.hexdigest(), bool(chat_name), misnamed
    )
    if corpus.n_bytes == 0:
        other = "has no text besides line breaks and end-of-text tokens"
        problem = other if n_nonempty else "is empty"
        raise CorpusError(f"the corpus {' '.join(paths)!r} {problem}", "name a file with text")
    return corpus


def _find_texts(source: Source) -> Iterator[Location]:
    """Find the documents of a text file: one, or several separated by end-of-text tokens."""
    position = 0
    while block := source.read(position, _BLOCK):
        if len(block) == _BLOCK:
            last = block.rfind(_SEPARATOR)
            if last < 0:
                end = _find_separator(source, position + _BLOCK - len(_SEPARATOR) + 1)
                if any(not part.isspace() for part in _read_blocks(source, position, end)):
                    n = end - position
                    content = chain([encode_length(n)], _read_blocks(source, position, end))
                    yield position, end, n, content
                position = end + len(_SEPARATOR)
                continue
            block = block[:last]
        for text in block.split(_SEPARATOR):
            end = position + len(text)
            if text.strip():
                yield position, end, len(text), (encode_length(len(text)), text)
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
