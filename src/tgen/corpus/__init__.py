"""From whatever the user points at to batches of token ids.

paths -> documents -> train and held-out documents -> tokens -> batch(step)
"""

from tgen.corpus.documents import Corpus, Document, read
from tgen.corpus.hold_out import Split, split
from tgen.corpus.token_store import Batch, Tokenised, TokenStore, arrays, tokenise

__all__ = [
    "Batch",
    "Corpus",
    "Document",
    "Split",
    "TokenStore",
    "Tokenised",
    "arrays",
    "read",
    "split",
    "tokenise",
]
