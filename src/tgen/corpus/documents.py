"""Documents of a corpus: located in their sources, read on demand.

A document is a tuple of parts. Parts are tokenized separately and concatenated; an end-of-text
token follows the document. A text has one part; a {"prompt", "completion"} row has two.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.sources import Source

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
Span = tuple[int, int]  # first byte, end
Indices = NDArray[np.int64]


class DocumentTable:
    """Locations of documents in their sources, 32 bytes per document."""

    def __init__(self) -> None:
        self.keys, self.sizes = array("Q"), array("q")  # equal documents have equal keys
        self._starts, self._ends = array("q"), array("q")
        self._sources: list[Source] = []
        self._first_documents: list[int] = []  # per source
        self._contains_rows: list[bool] = []  # per source
        self._open: Source | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def add_source(self, source: Source, *, rows: bool) -> None:
        """Start a source; the documents added next are in it, as rows of JSON or as text."""
        self._sources.append(source)
        self._first_documents.append(len(self))
        self._contains_rows.append(rows)

    def add_document(self, start: int, end: int, n_bytes: int, key: int) -> None:
        """Add the document in bytes `start` to `end` of its source; its parts have `n_bytes`."""
        self._starts.append(start)
        self._ends.append(end)
        self.sizes.append(n_bytes)
        self.keys.append(key)

    def is_row(self, numbers: Indices) -> NDArray[np.bool_]:
        """(n,) -> (n,): which documents are rows."""
        sources = np.searchsorted(self._first_documents, numbers, side="right") - 1
        return np.array(self._contains_rows, bool)[sources]

    def read(self, number: int, span: Span | None) -> Document:
        """Return a document, or a span of its only part.

        Raises CorpusError if its source has changed.
        """
        i = bisect_right(self._first_documents, number) - 1
        source, start, end = self._sources[i], self._starts[number], self._ends[number]
        if source is not self._open:
            self.close()
            self._open = source
        if not self._contains_rows[i]:
            first, last = span or (0, end - start)
            text = LongText(source, start + first, start + last)
            return (text if len(text) > _MAX_BYTES_IN_RAM else text[:],)
        parts = parse_row(source.read(start, end - start))
        if parts is None or document_size(parts) != self.sizes[number]:
            raise source.changed_error()
        return parts if span is None else (parts[0][slice(*span)],)

    def close(self) -> None:
        """Close the open source; raises CorpusError if it has changed."""
        if self._open is not None:
            self._open.close()
            self._open = None


class Documents:
    """A selection of documents from a table, in any order.

    `numbers` (n,) are their numbers in the table. `spans` limits single-part documents, by their
    index in the selection, to a byte range.
    """

    def __init__(
        self, table: DocumentTable, numbers: Indices, spans: Mapping[int, Span] | None = None
    ) -> None:
        self.table, self.numbers, self._spans = table, numbers, spans or {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Document:
        return self.table.read(int(self.numbers[i]), self._spans.get(i % len(self)))

    def __iter__(self) -> Iterator[Document]:
        return map(self.__getitem__, range(len(self)))

    @property
    def sizes(self) -> Indices:
        """(n,): bytes per document, without reading them."""
        sizes = np.frombuffer(self.table.sizes, np.int64)[self.numbers]
        for i, (start, end) in self._spans.items():
            sizes[i] = end - start
        return sizes

    @property
    def n_bytes(self) -> int:
        """Bytes of all documents."""
        return int(self.sizes.sum())

    def select(self, indices: Indices, spans: Mapping[int, Span] | None = None) -> "Documents":
        """Select documents by index; `spans` limits them by their index in the result."""
        new_spans = {}
        if self._spans:
            for new in np.flatnonzero(np.isin(indices, list(self._spans))).tolist():
                new_spans[new] = self._spans[int(indices[new])]
        for new, (start, end) in (spans or {}).items():
            first = new_spans.get(new, (0, 0))[0]
            new_spans[new] = (first + start, first + end)
        return Documents(self.table, self.numbers[indices], new_spans)


@dataclass(frozen=True)
class Corpus:
    """All documents in the order read."""

    documents: Documents
    skipped: list[str]  # binary files in directories
    sha256: str = ""  # of the documents and their boundaries

    @property
    def n_bytes(self) -> int:
        """Bytes of all documents."""
        return self.documents.n_bytes

    def close(self) -> None:
        """Close the sources; raises CorpusError if one has changed since it was first read."""
        self.documents.table.close()


def document_size(document: Document) -> int:
    """Bytes of all parts."""
    return sum(map(len, document))


def parse_row(line: bytes) -> tuple[bytes, ...] | None:
    """Return the parts of a JSON row, or None if it is not one."""
    try:
        values = json.loads(line)
        parts = (values["text"],) if "text" in values else (values["prompt"], values["completion"])
        return tuple(part.encode("utf-8", "surrogatepass") for part in parts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
