"""Cuts of a long text into chunks with the same tokens, so that memory use is bounded.

A cut must not be inside a word. If the whole text may be one word, the vocabulary may prove that no
token has a visible character after a line break.
"""

import re
from collections.abc import Iterator

from tgen.tokenizer.patterns import CUT_PATTERNS, LINE_STARTS
from tgen.tokenizer.spec import BYTE_CHARACTERS, BYTE_TOKENS, SPACE, TokenizerSpec

_NEWLINE = BYTE_CHARACTERS[10]
_WHITE = "".join(BYTE_CHARACTERS[byte] for byte in b"\t\n\v\f\r ")
_CROSSES_LINES = {  # tokens with a visible character after a line break, by `byte_level`
    True: re.compile(f"{_NEWLINE}[^{_WHITE}]"),
    False: re.compile(rf"\n[^\s{SPACE}]|.{BYTE_TOKENS[10]}|{BYTE_TOKENS[10]}.", re.DOTALL),
}

_AFTER_LINE = re.compile(r"\n\S")

_MAX_WORD = 1024  # characters; a longer run is not a word
_RUN_PIECE = 128  # characters of such a run; training is faster on shorter pieces
_WORD_CLASSES = (r"(?:[^\W\d_])", r"\s", r"(?:[^\w\s]|_)")  # letters, whitespace, others
_LONG_RUNS = re.compile("|".join(f"(?<!{c}){c}{{{_MAX_WORD + 1},}}" for c in _WORD_CLASSES))


def split_long_runs(text: str) -> Iterator[str]:
    """Split a text inside runs of one class of characters that are longer than any word.

    BPE training takes time in the square of a word's length.
    """
    start = 0
    for run in _LONG_RUNS.finditer(text):
        for end in range(run.start() + _RUN_PIECE, run.end(), _RUN_PIECE):
            yield text[start:end]
            start = end
    yield text[start:]


def cut_pattern(spec: TokenizerSpec) -> re.Pattern[str] | None:
    """Return a pattern that matches where a text may be cut; None if no cut is known to be safe.

    With a prefix, a text that contains one of `prefix_breaks` must not be cut at all.
    """
    in_text = [token for token in spec.added_tokens if not token.special]
    if any(_AFTER_LINE.search(token.content) for token in in_text):
        return None  # a token may cross the cut
    if any(token.lstrip or (token.single_word and "\n" in token.content) for token in in_text):
        return None  # they depend on the characters beside them, beyond the cut
    if spec.word_end:
        return LINE_STARTS  # whitespace separates words
    for pattern in spec.patterns:
        if CUT_PATTERNS[pattern]:
            return CUT_PATTERNS[pattern]
    if spec.ignore_merges:
        return None  # a chunk may be one token as a whole
    crosses_lines = _CROSSES_LINES[spec.byte_level]
    return None if any(map(crosses_lines.search, spec.vocab)) else LINE_STARTS


def prefix_breaks(spec: TokenizerSpec) -> tuple[str, ...]:
    """Return the added tokens after which a text gets a space again.

    If normalization may produce one of them, it is the empty string, which every text contains.
    """
    in_text = [token for token in spec.added_tokens if not token.special]
    if not spec.prefix or not in_text:
        return ()
    if any(token.normalized for token in in_text):
        return ("",)
    return tuple(token.content for token in in_text)
