"""From the user's paths to batches of token ids.

paths -> Source (bytes) -> Documents, split in two -> Tokens -> TokenDataset or PackedRows -> Batch
"""

from tgen.corpus.conversation import parse_conversation
from tgen.corpus.dataset import Batch, TokenDataset, Tokens, token_arrays, tokens_of
from tgen.corpus.document_table import Corpus, Documents, read, read_in_steps, read_text
from tgen.corpus.ngrams import count_bigrams, ngram_tables
from tgen.corpus.overlap import overlap_fraction
from tgen.corpus.packing import PackedRows, document_lengths
from tgen.corpus.split import (
    MAX_VAL_BYTES,
    PIECES,
    count_dropped,
    split_rows,
    split_train_val,
    subsample_documents,
)
from tgen.corpus.tokenize import ArrayBuilder, begin_of_document, tokenize_documents
