"""The regular expressions that split a text into words: those of models in use, and no others.

One from a file might take forever; these do not. With each goes where a long text may be cut: where
it ends a word, and would end the same word if the text ended there.
"""

import re

# Llama 3's, and ours: GGUF readers know a tokenizer by exactly this text.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
# Qwen 3.5's: marks are parts of words.
_MARKS = QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(
    r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"
)
# GPT-4o's, and Mistral's without its endings like 's: words begin at capital letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K, _TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{ending}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}|{digits}{_REST}"
    for ending, digits in ((_ENDING, r"\p{N}{1,3}"), ("", r"\p{N}"))
)
# Not patterns: the library has a splitter of its own for these.
DIGIT, DIGITS = "each digit", "all digits"

LINES = re.compile(r"(?<=\n)(?=\S)")  # after a line break that a visible character follows
CUTS: dict[str, re.Pattern[str] | None] = {
    WORDS: LINES,
    QWEN2: LINES,
    _MARKS: LINES,
    # A run of white space is one word where the text ends, and two before a visible character:
    # only where it is a single line break does it make no difference.
    GPT2: re.compile(r"(?<=\S\n)(?=\S)"),
    # A slash may follow a line break in one word.
    _O200K: re.compile(r"(?<=\n)(?=[^\s/])"),
    _TEKKEN: re.compile(r"(?<=\n)(?=[^\s/])"),
    # Numbers alone: what is between them is cut by what comes after.
    r"\p{N}": None,
    r"\p{N}{1,3}": None,
    DIGIT: None,
    DIGITS: None,
}
