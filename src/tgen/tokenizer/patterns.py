"""The regular expressions that split a text into words: only those of models in use.

A pattern from a file could take forever; these do not. CUT_PATTERNS says where a long text may be
cut: at the end of a word that would also end there if the text did.
"""

import re

# Llama 3's, and that of tokenizers trained here: GGUF readers recognize exactly this text.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Qwen 3.5's: combining marks are parts of words.
QWEN35 = QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(
    r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"
)
# GPT-4o's, and Mistral's without endings such as 's: words start at capital letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K, TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{ending}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}|{digits}{_REST}"
    for ending, digits in ((_ENDING, r"\p{N}{1,3}"), ("", r"\p{N}"))
)
# Not patterns: the library has its own splitter for these.
SINGLE_DIGITS, DIGIT_RUNS = "each digit", "all digits"

LINE_STARTS = re.compile(r"(?<=\n)(?=\S)")  # after a line break, before a visible character
CUT_PATTERNS: dict[str, re.Pattern[str] | None] = {
    LLAMA3: LINE_STARTS,
    QWEN2: LINE_STARTS,
    QWEN35: LINE_STARTS,
    # A run of whitespace is one word at the end of the text, but two before a visible character:
    # this makes no difference only for a single line break.
    GPT2: re.compile(r"(?<=\S\n)(?=\S)"),
    # In a word a slash may follow a line break.
    O200K: re.compile(r"(?<=\n)(?=[^\s/])"),
    TEKKEN: re.compile(r"(?<=\n)(?=[^\s/])"),
    # These split numbers only; another pattern splits the text between them.
    r"\p{N}": None,
    r"\p{N}{1,3}": None,
    SINGLE_DIGITS: None,
    DIGIT_RUNS: None,
}
