"""Tokenizers: bytes -> ids -> the same bytes. Trained here, or read from a tokenizer.json."""

from tgen.tokenizer.tokenizer import END_OF_TEXT, PAD, TextStream, TokenBytes, Tokenizer
from tgen.tokenizer.tokenizer_json import BYTE_CHARACTERS
from tgen.tokenizer.train import make_tokenizer, train_bpe, train_char, train_words

__all__ = [
    "BYTE_CHARACTERS",
    "END_OF_TEXT",
    "PAD",
    "TextStream",
    "TokenBytes",
    "Tokenizer",
    "make_tokenizer",
    "train_bpe",
    "train_char",
    "train_words",
]
