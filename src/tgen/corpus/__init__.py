"""From whatever the user points at to batches of token ids.

paths -> documents -> train and held-out documents -> tokens -> batch(step)
"""

from tgen.corpus.dataset import Batch, TokenDataset
from tgen.corpus.documents import Corpus, Document, size, sizes
from tgen.corpus.ngrams import ngram_tables
from tgen.corpus.overlap import overlap_fraction
from tgen.corpus.reader import read
from tgen.corpus.subsample import MAX_HELD_OUT_BYTES, subsample
from tgen.corpus.tokenize import TokenizedCorpus, arrays, tokenising, tokenize
from tgen.corpus.train_val_split import Split, train_val_split

__all__ = [
    "MAX_HELD_OUT_BYTES",
    "Batch",
    "Corpus",
    "Document",
    "Split",
    "TokenDataset",
    "TokenizedCorpus",
    "arrays",
    "ngram_tables",
    "overlap_fraction",
    "read",
    "size",
    "sizes",
    "subsample",
    "tokenising",
    "tokenize",
    "train_val_split",
]
