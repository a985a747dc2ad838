"""From whatever the user points at to batches of token ids.

    paths -> documents -> train and held-out documents -> tokens -> batch(step)

A document is a tuple of parts that are tokenised apart and joined with nothing; the end-of-text
token follows it. Text has one part; a row of {"prompt", "completion"} has two.
"""

import glob
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen import files
from tgen.errors import CorpusError, TgenError
from tgen.tokenizer import END_OF_TEXT, Tokenizer

Document = tuple[bytes, ...]
Tokens = NDArray[np.uint16 | np.uint32]


@dataclass(frozen=True)
class Corpus:
    """Documents in the order read. Those numbered in `rows` are rows, which a split keeps whole."""

    documents: list[Document]
    rows: frozenset[int]
    skipped: list[str]  # files of a folder that are no text

    @property
    def n_bytes(self) -> int:
        """Bytes of all documents."""
        return sum(len(part) for document in self.documents for part in document)

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


class Split(NamedTuple):
    """The documents to train on and those held out; `cut`: the border lies inside a document."""

    train: list[Document]
    held_out: list[Document]
    cut: bool


def split(corpus: Corpus, val_fraction: float) -> Split:
    """The first part to train on and the last `val_fraction` of the bytes, held out.

    A text is cut at that very character; rows are never cut, so the border moves to the nearest
    one's end. Either part may come out empty.
    """
    border = round(corpus.n_bytes * (1 - val_fraction))
    train: list[Document] = []
    held_out: list[Document] = []
    start, cut = 0, False
    for number, document in enumerate(corpus.documents):
        size = sum(map(len, document))
        is_row = number in corpus.rows
        inside = border - start  # bytes of this document before the border
        if inside >= size or (is_row and inside >= size / 2):
            train.append(document)
        elif inside <= 0 or is_row:
            held_out.append(document)
        else:
            (text,) = document
            place = _character_start(text, inside)
            if place > 0:
                train.append((text[:place],))
                cut = True
            held_out.append((text[place:],))
        start += size
    return Split(train, held_out, cut)


def tokenise(
    documents: Iterable[Document], tokenizer: Tokenizer, *, open_end: bool = False
) -> Tokens:
    """All documents as one array (n,), an end-of-text token after each where the tokenizer has one;
    with `open_end` not after the last, which goes on elsewhere."""
    kind = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    parts: list[NDArray[np.uint32]] = []
    for document in documents:
        parts += [tokenizer.encode_array(part) for part in document]
        if tokenizer.end_of_text is not None:
            parts.append(np.array([tokenizer.end_of_text], np.uint32))
    if open_end and tokenizer.end_of_text is not None:
        del parts[-1]
    tokens: Tokens = np.concatenate([np.zeros(0, np.uint32), *parts]).astype(kind)
    return tokens


@dataclass(frozen=True)
class TokenStore:
    """The tokens of a run and the order they are seen in, a pure function of seed and step."""

    train: Tokens  # (n,)
    held_out: Tokens  # (m,); empty: nothing is held out
    held_out_bytes: int
    context_length: int
    batch_size: int
    seed: int

    @property
    def held_out_tokens(self) -> int:
        """Tokens held out."""
        return len(self.held_out)

    def batch(self, step: int) -> NDArray[np.int64]:
        """Step `step`'s windows, (batch_size, context_length + 1): inputs and, shifted, targets.

        Every epoch cuts the text into windows at a new offset and deals them in a new order, so
        each token is seen once an epoch.
        """
        length = self.context_length
        per_epoch = max(1, (len(self.train) - 1) // length)
        windows = np.empty((self.batch_size, length + 1), np.int64)
        for row in range(self.batch_size):
            epoch, i = divmod(step * self.batch_size + row, per_epoch)
            offset, order = _epoch(self.seed, epoch, per_epoch, len(self.train) - length)
            start = (offset + order[i] * length) % (len(self.train) - length)
            windows[row] = self.train[start : start + length + 1]
        return windows

    def held_out_windows(self, max_tokens: int) -> Iterator[NDArray[np.int64]]:
        """Windows (n, up to context_length + 1) that predict each held-out token exactly once.

        They do not overlap but for the first token of each, which is the last of the one before
        (of the training text for the first). More than `max_tokens` are thinned out evenly.
        """
        length = self.context_length
        stream = np.concatenate([self.train[-1:], self.held_out]).astype(np.int64)
        n_full = (len(stream) - 1) // length
        starts = np.arange(n_full) * length
        if len(self.held_out) > max_tokens:
            starts = starts[:: -(-len(self.held_out) // max_tokens)]
        per_batch = max(1, 8192 // length)
        for i in range(0, len(starts), per_batch):
            yield stream[starts[i : i + per_batch, None] + np.arange(length + 1)]
        if len(stream) - 1 > n_full * length and len(self.held_out) <= max_tokens:
            yield stream[None, n_full * length :]


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def _epoch(seed: int, epoch: int, n_windows: int, n_starts: int) -> tuple[int, NDArray[np.int64]]:
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return int(random.integers(n_starts)), random.permutation(n_windows)


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


def _character_start(text: bytes, position: int) -> int:
    """The nearest place at or before `position` where a UTF-8 character starts."""
    for back in range(min(3, position) + 1):
        if text[position - back] & 0xC0 != 0x80:
            return position - back
    return position
