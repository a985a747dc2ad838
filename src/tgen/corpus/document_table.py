"""Documents of a corpus: found in one pass over their sources, read again on demand.

A document is a tuple of parts. Parts are tokenized separately and concatenated; an end-of-text
token follows the document. A text has one part; a {"prompt", "completion"} row has two. The part of
a conversation is its row, see `conversation.parse_conversation`. Only a few megabytes are in RAM at
a time, except for a JSON row, which is read whole.
"""

import hashlib
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.config.input_files import Reading
from tgen.corpus.jsonl import (
    Location,
    contains_conversations,
    encode_length,
    find_rows,
    line_number,
    parse_row,
)
from tgen.corpus.open_sources import OwnFiles, ReadingReport, open_sources
from tgen.corpus.sources import Source
from tgen.corpus.steps import Steps, finish
from tgen.errors import CorpusError
from tgen.tokenizer import END_OF_TEXT

_DEFAULT_READING = Reading()
_SEPARATOR = END_OF_TEXT.encode()
_BLOCK = 1 << 22  # bytes per read
_MAX_BYTES_IN_RAM = 1 << 22  # a longer text is returned as a LongText


class LongText:
    """A byte range of a source that may not fit in RAM; slices are bytes."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self._source, self._start, self._end = source, start, end

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, span: slice) -> bytes:
        """Return a slice with step 1. Raises CorpusError if the source has changed."""
        first, last, step = span.indices(len(self))
        assert step == 1
        n = max(0, last - first)
        data = self._source.read(self._start + first, n)
        if len(data) != n:
            raise self._source.changed_error()
        return data


Part = bytes | LongText
Document = tuple[Part, ...]
Indices = NDArray[np.int64]


class DocumentTable:
    """Locations of documents in their sources, 32 bytes per document."""

    def __init__(self) -> None:
        self.keys, self.sizes = array("Q"), array("q")  # equal documents have equal keys
        self.starts, self.ends = array("q"), array("q")  # bytes of their sources
        self.sources: list[tuple[Source, bool, bool]] = []  # whether rows; whether conversations
        self.first_documents: list[int] = []  # per source
        self._open: Source | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def add_source(self, source: Source, *, rows: bool, chats: bool = False) -> None:
        """Start a source; the documents added next are in it, as rows of JSON or as text.

        `chats`: the rows are conversations.
        """
        self.sources.append((source, rows, chats))
        self.first_documents.append(len(self))

    def add_document(self, start: int, end: int, n_bytes: int, key: int) -> None:
        """Add the document in bytes `start` to `end` of its source; its parts have `n_bytes`."""
        self.starts.append(start)
        self.ends.append(end)
        self.sizes.append(n_bytes)
        self.keys.append(key)

    def all_documents(self) -> "Documents":
        """Select all documents in the order added."""
        sizes = np.array(self.sizes, np.int64)
        return Documents(self, np.arange(len(self)), np.zeros_like(sizes), sizes)

    def open(self, source: Source) -> None:
        """Close the open source before another one is read."""
        if source is not self._open:
            self.close()
            self._open = source

    def close(self) -> None:
        """Close the open source; raises CorpusError if it has changed."""
        if self._open is not None:
            self._open.close()
            self._open = None


class Documents:
    """A selection of documents from a table, in any order.

    `numbers` (n,) are their numbers in the table; of single-part documents only the bytes from
    `starts` (n,) to `ends` (n,) are selected. `open_end`: the last text continues in the other
    split of the corpus.
    """

    def __init__(
        self,
        table: DocumentTable,
        numbers: Indices,
        starts: Indices,
        ends: Indices,
        *,
        open_end: bool = False,
    ) -> None:
        self._table, self._numbers, self.open_end = table, numbers, open_end
        self._starts, self._ends = starts, ends

    def __len__(self) -> int:
        return len(self._numbers)

    def _find(self, i: int) -> tuple[int, int]:
        """Return the numbers of a document and of its source in the table."""
        number = int(self._numbers[i])
        return number, bisect_right(self._table.first_documents, number) - 1

    def __getitem__(self, i: int) -> Document:
        """Return a document. Raises CorpusError if its source has changed."""
        table, (number, source_number) = self._table, self._find(i)
        source, is_row, is_chat = table.sources[source_number]
        table.open(source)
        first, start, end = table.starts[number], int(self._starts[i]), int(self._ends[i])
        if not is_row:
            text = LongText(source, first + start, first + end)
            return (text if len(text) > _MAX_BYTES_IN_RAM else text[:],)
        line = source.read(first, table.ends[number] - first)
        if is_chat:
            return (line,)
        parts = parse_row(line)
        if parts is None or sum(map(len, parts)) != table.sizes[number]:
            raise source.changed_error()
        return parts if len(parts) > 1 else (parts[0][start:end],)

    def __iter__(self) -> Iterator[Document]:
        return map(self.__getitem__, range(len(self)))

    def name(self, i: int) -> str:
        """Return the name of a document's source, with `#` and its number, from 1, if it has more.

        All documents of the table have been added.
        """
        table, (number, source_number) = self._table, self._find(i)
        name = table.sources[source_number][0].name
        first, end, *_ = *table.first_documents[source_number : source_number + 2], len(table)
        return f"{name}#{number - first + 1}" if end - first > 1 else name

    def describe(self, i: int) -> str:
        """Return the file and the line of a row."""
        source, start, *_ = self.place(i)
        return f"{source.name}, line {line_number(source, start)}"

    def place(self, i: int) -> tuple[Source, int, bool, bool]:
        """Return the source of a document, the position there of its first selected byte (of a row,
        its first), and whether it is a row, and a conversation."""
        number, source_number = self._find(i)
        source, is_row, is_chat = self._table.sources[source_number]
        start = self._table.starts[number] + (0 if is_row else int(self._starts[i]))
        return source, start, is_row, is_chat

    @property
    def sizes(self) -> Indices:
        """(n,): bytes per document, without reading them."""
        return self._ends - self._starts

    @property
    def keys(self) -> NDArray[np.uint64]:
        """(n,): hashes of the documents' content, equal for copies."""
        return np.frombuffer(self._table.keys, np.uint64)[self._numbers]

    @property
    def is_row(self) -> NDArray[np.bool_]:
        """(n,): which documents are rows."""
        sources = np.searchsorted(self._table.first_documents, self._numbers, side="right") - 1
        return np.array([is_row for _, is_row, _ in self._table.sources], bool)[sources]

    @property
    def n_bytes(self) -> int:
        """Bytes of all documents."""
        return int(self.sizes.sum())

    def select(
        self, indices: Indices, starts: Indices, ends: Indices, *, open_end: bool = False
    ) -> "Documents":
        """Select the bytes from `starts` to `ends` of the documents at `indices`, all (m,)."""
        first, numbers = self._starts[indices], self._numbers[indices]
        return Documents(self._table, numbers, first + starts, first + ends, open_end=open_end)

    def close(self) -> None:
        """Close the sources; raises CorpusError if one has changed since it was first read."""
        self._table.close()


@dataclass(frozen=True)
class Corpus:
    """All documents in the order read."""

    documents: Documents
    notes: list[str]  # how files were read, and which were skipped
    sha256: str = ""  # hash of the documents and their boundaries
    is_chat: bool = False  # the documents are conversations
    detected_encodings: dict[str, str] = field(default_factory=dict)  # by file

    @property
    def n_bytes(self) -> int:
        """Bytes of all documents."""
        return self.documents.n_bytes

    def close(self) -> None:
        """Close the sources; raises CorpusError if one has changed since it was first read."""
        self.documents.close()


def read(
    paths: Sequence[str], progress: Callable[[float], None] = lambda _: None, **options: Any
) -> Corpus:
    """Return the corpus of files, directories, glob patterns and `-` (stdin).

    `progress` gets the fraction of its bytes that are read and converted. See `read_in_steps` for
    the options and errors.
    """
    return finish(read_in_steps(paths, **options), progress)


def read_in_steps(
    paths: Sequence[str],
    *,
    chat: bool = False,
    own_files: OwnFiles = lambda _: set(),
    mixed_hint: str = "train on one of them first, then on the other with --from",
    reading: Reading | None = _DEFAULT_READING,
    known_encodings: dict[str, str] | None = None,
) -> Steps[Corpus]:
    """Read files, directories, glob patterns and `-` (stdin); CorpusError if all are empty.

    Yield the fraction of their bytes that are read and converted. Rows whose first has messages, or
    with `chat` all, are conversations; they are an error beside other text, with `mixed_hint`. See
    `open_sources` for the other arguments.
    """
    report = ReadingReport()
    n_nonempty = 0
    table, fingerprint = DocumentTable(), hashlib.sha256()
    text_name = chat_name = ""  # of the first source of this kind
    done = 0.0  # fraction
    for source in open_sources(
        paths, report, own_files, reading, known_encodings=known_encodings, chat=chat
    ):
        if isinstance(source, float):
            done = source
            yield done
            continue
        rows = source.has_rows
        chats = rows and (chat or contains_conversations(source))
        if source.read(0, 1):
            n_nonempty += 1
            text_name = text_name or ("" if chats else source.name)
            chat_name = chat_name or (source.name if chats else "")
        table.add_source(source, rows=rows, chats=chats)
        position = 0
        found = find_rows(source, chats=chats) if rows else _find_texts(source)
        try:
            for start, end, n_bytes, content in found:
                own = hashlib.sha256() if len(table) else fingerprint  # the same so far
                for block in content:
                    own.update(block)
                    if own is not fingerprint:
                        fingerprint.update(block)
                    if source.position > position:  # another block was read
                        position = source.position
                        yield done + (source.done - done) * min(1.0, position / source.n_bytes)
                key = int.from_bytes(own.digest()[:8], "little")
                fingerprint.update(b"\xff" * 8)
                table.add_document(start, end, n_bytes, key)
        finally:
            source.close()
        done = source.done
    if chat_name and text_name:
        raise CorpusError(
            f"{chat_name} has conversations, {text_name} has not",
            f"{mixed_hint}, or add --as text to read both as text",
        )
    if chat and text_name:
        raise CorpusError(
            f"--chat: {text_name} has no conversations",
            "remove --chat, or write one JSON object per line into a .jsonl file",
        )
    corpus = Corpus(
        table.all_documents(),
        report.notes(),
        fingerprint.hexdigest(),
        bool(chat_name),
        report.detected,
    )
    if corpus.n_bytes == 0:
        other = "has no text besides line breaks and end-of-text tokens"
        problem = other if n_nonempty else "is empty"
        if report.skipped or report.models:
            problem = f"has no text: {report.notes()[-1]}"
        raise CorpusError(f"the corpus {' '.join(paths)!r} {problem}", "name a file with text")
    return corpus


def read_text(
    path: str, progress: Callable[[float], None] = lambda _: None
) -> tuple[bytes, list[str]]:
    """Return the text of a file, JSON and CSV as they are, and notes on how it was read.

    Texts of several files, as in an archive, and parts of a document are separated by an empty
    line. `progress` gets the fraction that is read. Raises CorpusError for a file without text.
    """
    if Path(path).is_dir():
        raise CorpusError(f"{path} is a directory", "name a file")
    report = ReadingReport()
    texts = []
    try:
        for source in open_sources([path], report, reading=_DEFAULT_READING, keep_rows=True):
            if isinstance(source, float):
                progress(source)
                continue
            text = source.read(0, source.n_bytes)
            source.close()
            texts.append(text.replace(_SEPARATOR, b"\n\n") if report.n_documents else text)
    except CorpusError as error:
        raise CorpusError(error.message, _without_options(error.hint)) from None
    return b"\n\n".join(texts), [_without_options(note) for note in report.notes()]


def _without_options(advice: str) -> str:
    """Return advice without the options that only commands for corpora have."""
    return re.split(r", or add --encoding|; --as ", advice)[0]


def _find_texts(source: Source) -> Iterator[Location]:
    """Find the documents of a text file: one, or several separated by end-of-text tokens."""
    position = 0
    while block := source.read(position, _BLOCK):
        if len(block) == _BLOCK:
            last = block.rfind(_SEPARATOR)
            if last < 0:
                end = _find_separator(source, position + _BLOCK - len(_SEPARATOR) + 1)
                if any(not part.isspace() for part in source.blocks(position, end)):
                    n = end - position
                    content = chain([encode_length(n)], source.blocks(position, end))
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
