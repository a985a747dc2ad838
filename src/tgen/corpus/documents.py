"""Files, folders, glob patterns, stdin and JSONL -> documents.

A document is a tuple of parts that are tokenised apart and joined with nothing; the end-of-text
token follows it. Text has one part; a row of {"prompt", "completion"} has two.
"""

import glob
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tgen import files
from tgen.errors import CorpusError, TgenError
from tgen.tokenizer import END_OF_TEXT

Document = tuple[bytes, ...]


def size(document: Document) -> int:
    """Bytes of all its parts."""
    return sum(map(len, document))


@dataclass(frozen=True)
class Corpus:
    """Documents in the order read. Those numbered in `rows` are rows, which a split keeps whole."""

    documents: list[Document]
    rows: frozenset[int]
    skipped: list[str]  # files of a folder that are no text

    @property
    def n_bytes(self) -> int:
        """Bytes of all documents."""
        return sum(map(size, self.documents))

    @property
    def sha256(self) -> str:
        """A fingerprint of the documents, their borders included."""
        digest = hashlib.sha256()
        for document in self.documents:
            for part in document:
                digest.update(len(part).to_bytes(8, "little") + part)
            digest.update(b"\xff" * 8)
        return digest.hexdigest()


def read(paths: Sequence[str]) -> Corpus:
    """Reads files, folders, glob patterns and `-` (stdin); raises CorpusError where nothing is."""
    documents: list[Document] = []
    skipped: list[str] = []
    rows: set[int] = set()
    for name, data in _sources(paths, skipped):
        found = _rows(name, data)
        if found is not None:
            rows |= set(range(len(documents), len(documents) + len(found)))
        documents += found if found is not None else _texts(data)
    corpus = Corpus(documents, frozenset(rows), skipped)
    if corpus.n_bytes == 0:
        raise CorpusError(f"the corpus {' '.join(paths)!r} is empty", "name a file that holds text")
    return corpus


def _sources(paths: Sequence[str], skipped: list[str]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        if path == "-":
            if sys.stdin is None:
                raise CorpusError("stdin is closed", "pipe a text in, or name a file")
            yield "-", sys.stdin.buffer.read()
        elif Path(path).is_dir():
            for file in sorted(Path(path).rglob("*")):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.is_file() and not hidden:
                    data = _read(file)
                    if b"\0" in data[:8192]:
                        skipped.append(str(file))
                    else:
                        yield file.name, data
        elif not Path(path).exists() and any(mark in path for mark in "*?["):
            matches = sorted(m for m in glob.glob(path, recursive=True) if Path(m).is_file())
            if not matches:
                raise CorpusError(f"no file matches {path!r}", "quote the pattern and check it")
            for match in matches:
                yield match, _read(Path(match))
        else:
            yield path, _read(Path(path))


def _read(path: Path) -> bytes:
    try:
        return files.read(path)
    except TgenError as error:
        raise CorpusError(error.message, error.hint or "name a readable file of text") from None


def _texts(data: bytes) -> list[Document]:
    """A text file is one document, or several with written-out end-of-text tokens between."""
    return [(text,) for text in data.split(END_OF_TEXT.encode()) if text.strip()]


def _rows(name: str, data: bytes) -> list[Document] | None:
    """The rows of a JSONL source, or None if it is plain text."""
    if not name.endswith((".jsonl", ".ndjson")) and not (name == "-" and _looks_like_rows(data)):
        return None
    documents: list[Document] = []
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            row = _row(line)
            if row is None:
                start = line[:50].decode(errors="replace")
                raise CorpusError(
                    f"{name}, line {number} is no row of text: {start!r}",
                    'each line must be {"text": "..."} or {"prompt": "...", "completion": "..."}',
                )
            documents.append(row)
    return documents


def _looks_like_rows(data: bytes) -> bool:
    return _row(data.lstrip()[: 1 << 20].split(b"\n", 1)[0]) is not None


def _row(line: bytes) -> Document | None:
    try:
        row = json.loads(line)
        parts = (row["text"],) if "text" in row else (row["prompt"], row["completion"])
        return tuple(part.encode("utf-8", "surrogatepass") for part in parts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
