"""From whatever the user points at to batches of token ids.

paths -> documents -> train and held-out documents -> tokens -> batch(step)
"""

from tgen.corpus.documents import Corpus, Document, size, sizes
from tgen.corpus.duplicates import shared_share
from tgen.corpus.hold_out import Split, split
from tgen.corpus.ngrams import ngram_tables
from tgen.corpus.reading import read
from tgen.corpus.thin import MAX_HELD_OUT_BYTES, thin
from tgen.corpus.token_store import Batch, TokenStore
from tgen.corpus.tokens import Tokenised, arrays, tokenise, tokenising

__all__ = [
    "MAX_HELD_OUT_BYTES",
    "Batch",
    "Corpus",
    "Document",
    "Split",
    "TokenStore",
    "Tokenised",
    "arrays",
    "ngram_tables",
    "read",
    "shared_share",
    "size",
    "sizes",
    "split",
    "thin",
    "tokenise",
    "tokenising",
]
