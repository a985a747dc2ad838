"""From the user's paths to batches of token ids.

paths -> documents -> training and validation documents -> tokens -> batch(step)
"""

from tgen.corpus.bigrams import count_bigrams
from tgen.corpus.dataset import Batch, TokenDataset
from tgen.corpus.documents import Corpus, Document, Documents
from tgen.corpus.ngrams import ngram_tables
from tgen.corpus.overlap import overlap_fraction
from tgen.corpus.scan import read
from tgen.corpus.subsample import MAX_VAL_BYTES, subsample_documents
from tgen.corpus.tokenize import (
    TokenizedCorpus,
    from_old_names,
    to_old_names,
    token_arrays,
    tokenize_documents,
)
from tgen.corpus.train_val_split import TrainValSplit, split_train_val

__all__ = [
    "MAX_VAL_BYTES",
    "Batch",
    "Corpus",
    "Document",
    "Documents",
    "TokenDataset",
    "TokenizedCorpus",
    "TrainValSplit",
    "count_bigrams",
    "from_old_names",
    "ngram_tables",
    "overlap_fraction",
    "read",
    "split_train_val",
    "subsample_documents",
    "to_old_names",
    "token_arrays",
    "tokenize_documents",
]
