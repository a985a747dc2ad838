"""Documents, which stay where they lie and are read when they are needed.

A document is a tuple of parts that are tokenised apart and joined with nothing; the end-of-text
token follows it. Text has one part; a row of {"prompt", "completion"} has two.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tgen.corpus.sources import Source

_READ_WHOLE = 1 << 22  # bytes of a text that is handed out as bytes


class LongText:
    """A text of a source that is too long for the memory; its slices are bytes."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self._source, self._start, self._end = source, start, end

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, where: slice) -> bytes:
        """A slice without a step; raises CorpusError where the source has changed."""
        first, last, step = where.indices(len(self))
        assert step == 1
        n = max(0, last - first)
        data = self._source.read(self._start + first, n)
        if len(data) != n:
            raise self._source.changed()
        return data


Part = bytes | LongText
Document = tuple[Part, ...]
Numbers = NDArray[np.int64]


def size(document: Document) -> int:
    """Bytes of all its parts."""
    return sum(map(len, document))


@dataclass(frozen=True)
class Corpus:
    """Documents in the order read. Those numbered in `rows` are rows, which a split keeps whole."""

    documents: Sequence[Document]
    rows: Container[int]
    skipped: list[str]  # files of a folder that are no text
    sha256: str = ""  # a fingerprint of the documents, their borders included

    @property
    def n_bytes(self) -> int:
        """Bytes of all documents."""
        return int(sizes(self.documents).sum())

    def close(self) -> None:
        """After the last reading; raises CorpusError where something has changed meanwhile."""
        if isinstance(self.documents, Documents):
            self.documents.table.close()


class Table:
    """Where each document of the sources lies, in 32 bytes; a container of the rows' numbers."""

    def __init__(self) -> None:
        self.keys, self.sizes = array("Q"), array("q")  # equal documents have equal keys
        self._starts, self._ends = array("q"), array("q")
        self._sources: list[Source] = []
        self._firsts: list[int] = []  # each source's first document
        self._hold_rows: list[bool] = []
        self._open: Source | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return self._hold_rows[bisect_right(self._firsts, number) - 1]

    def begin(self, source: Source, *, rows: bool) -> None:
        """What is added from here on lies in `source`."""
        self._sources.append(source)
        self._firsts.append(len(self))
        self._hold_rows.append(rows)

    def add(self, start: int, end: int, n_bytes: int, key: int) -> None:
        """A document in these bytes of its source; its parts have `n_bytes`."""
        self._starts.append(start)
        self._ends.append(end)
        self.sizes.append(n_bytes)
        self.keys.append(key)

    def document(self, number: int, cut: tuple[int, int] | None) -> Document:
        """One of them, or what lies between two places of its only part.

        Raises CorpusError where its source has changed.
        """
        place = bisect_right(self._firsts, number) - 1
        source, start, end = self._sources[place], self._starts[number], self._ends[number]
        if source is not self._open:
            self.close()
            self._open = source
        if not self._hold_rows[place]:
            first, last = cut or (0, end - start)
            text = LongText(source, start + first, start + last)
            return (text if len(text) > _READ_WHOLE else text[:],)
        found = row(source.read(start, end - start))
        if found is None or size(found) != self.sizes[number]:
            raise source.changed()
        return found if cut is None else (found[0][slice(*cut)],)

    def close(self) -> None:
        """Closes what is open; raises CorpusError if that has changed."""
        if self._open is not None:
            self._open.close()
            self._open = None


class Documents(Sequence[Document]):
    """Some documents of a table, in any order: those of these `numbers`, and of those in `cuts`, by
    their place here, what lies between two places of their only part."""

    def __init__(
        self, table: Table, numbers: Numbers, cuts: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        self.table, self.numbers, self.cuts = table, numbers, cuts or {}

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, i: int) -> Document: ...

    @overload
    def __getitem__(self, i: slice) -> "Documents": ...

    def __getitem__(self, i: int | slice) -> "Document | Documents":
        if isinstance(i, slice):
            return self.select(np.arange(len(self))[i], {})
        return self.table.document(int(self.numbers[i]), self.cuts.get(i % len(self)))

    def select(self, places: Numbers, cuts: Mapping[int, tuple[int, int]]) -> "Documents":
        """See `select`."""
        found = {}
        if self.cuts:
            for new in np.flatnonzero(np.isin(places, list(self.cuts))).tolist():
                found[new] = self.cuts[int(places[new])]
        for new, (start, end) in cuts.items():
            first = found.get(new, (0, 0))[0]
            found[new] = (first + start, first + end)
        return Documents(self.table, self.numbers[places], found)


def sizes(documents: Sequence[Document]) -> Numbers:
    """Each document's bytes, (n,), without reading them."""
    if not isinstance(documents, Documents):
        return np.array([size(document) for document in documents], np.int64)
    found = np.frombuffer(documents.table.sizes, np.int64)[documents.numbers]
    for place, (start, end) in documents.cuts.items():
        found[place] = end - start
    return found


def select(
    documents: Sequence[Document], places: Numbers, cuts: Mapping[int, tuple[int, int]]
) -> Sequence[Document]:
    """The documents at these places; of those in `cuts`, by their number in the result, what lies
    between two places of their only part."""
    if isinstance(documents, Documents):
        return documents.select(places, cuts)
    found = [documents[place] for place in places.tolist()]
    for new, cut in cuts.items():
        found[new] = (found[new][0][slice(*cut)],)
    return found


def row(line: bytes) -> tuple[bytes, ...] | None:
    """The parts of a row in JSON; None if it is none."""
    try:
        values = json.loads(line)
        parts = (values["text"],) if "text" in values else (values["prompt"], values["completion"])
        return tuple(part.encode("utf-8", "surrogatepass") for part in parts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
