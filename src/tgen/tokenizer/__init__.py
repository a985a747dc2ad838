"""Tokenizers: bytes -> ids -> the same bytes. Trained here, or read from a tokenizer.json.

allowlist      the components of a tokenizer.json that tgen supports
spec           the checked content of a tokenizer.json
patterns       the supported regular expressions that split a text into words
byte_alphabet  how vocabularies write bytes
backend        the tokenizers library, built from a spec
chunking       where a long text may be cut without changing its tokens
tokenizer      Tokenizer: bytes to ids and back
train          train new tokenizers, by characters or byte pairs
stream         token by token into whole characters
"""

from tgen.tokenizer.byte_alphabet import BYTE_CHARACTERS
from tgen.tokenizer.stream import TextStream
from tgen.tokenizer.tokenizer import END_OF_TEXT, PAD, Tokenizer
from tgen.tokenizer.train import DEFAULT_VOCAB_SIZE, make_tokenizer, train_bpe, train_char

__all__ = [
    "BYTE_CHARACTERS",
    "DEFAULT_VOCAB_SIZE",
    "END_OF_TEXT",
    "PAD",
    "TextStream",
    "Tokenizer",
    "make_tokenizer",
    "train_bpe",
    "train_char",
]
