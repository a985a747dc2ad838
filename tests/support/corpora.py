"""Corpora and tokens made from bytes."""

import hashlib
import json

from tgen import corpus
from tgen.corpus import Corpus
from tgen.corpus.document_table import DocumentTable
from tgen.corpus.sources import Source


def make_corpus(documents, *, rows=False):
    """Make a corpus of documents (tuples of parts), each in its own source; `rows`: as JSON."""
    table = DocumentTable()
    for parts in documents:
        content = _to_row(parts) if rows else b"".join(parts)
        table.add_source(Source("corpus", content), rows=rows)
        content_key = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        key = int.from_bytes(hashlib.sha256(content_key).digest()[:8], "little")
        table.add_document(0, len(content), sum(map(len, parts)), key)
    return Corpus(table.all_documents(), [])


def tokenize(documents, tokenizer, **options):
    """Return the tokens of documents."""
    return tokenize_counting(documents, tokenizer, **options)[0]


def tokenize_counting(documents, tokenizer, **options):
    """Return the tokens of documents, their bytes in the loss, and the replaced characters."""
    return run_generator(corpus.tokenize_documents(documents, tokenizer, **options))[0]


def run_generator(steps):
    """Return a generator's return value and a list of the yielded values."""
    yielded = []
    while True:
        try:
            yielded.append(next(steps))
        except StopIteration as end:
            return end.value, yielded


def _to_row(parts):
    names = ["text"] if len(parts) == 1 else ["prompt", "completion"]
    texts = [part.decode("utf-8", "surrogatepass") for part in parts]
    return json.dumps(dict(zip(names, texts, strict=True))).encode()
