"""Tokenizers: bytes -> ids -> the same bytes. Trained here, or read from anyone's tokenizer.json.

allowed     what of a tokenizer.json is understood: the library sees nothing else
patterns    the regular expressions that may split a text into words
backend     the tokenizers library, made from what `allowed` found
cutting     where a long text may be cut without changing its tokens
tokenizer   the Tokenizer: bytes to ids and back
training    new ones, by characters or by byte pairs
stream      token after token into whole characters
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
