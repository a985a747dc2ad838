"""The pre-tokenizers, rules that split a text into words: only those of models in use.

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
# Seed-Coder's: line breaks are not part of punctuation.
SEED_CODER = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}{1}").replace(
    r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"
)
# Ling's (BailingMoE).
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Jais 2's: runs of spaces are split into powers of two.
JAIS2 = LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + (
    "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"\s{1}"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_LLAMA3_NUMBERS = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")

# These split parts of words only, before or after another pattern.
NUMBER, THREE_NUMBERS = r"\p{N}", r"\p{N}{1,3}"
ASCII_THREE_DIGITS = "[0-9][0-9][0-9]"
_DEEPSEEK_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"  # CJK, Hiragana, Katakana
_DEEPSEEK_V3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (  # letters that have upper and lower case
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943]+"
)
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~！-／：-～\u2018-\u201f\u3000-。]+"
_DEEPSEEK_EAST_ASIAN = "[一-龥\u0800-一가-\ud7ff]+"
_LINE_BREAK, _FINAL_SPACES = r"[\r\n]", r"\s+$"
_CASED_WORD, _PUNCTUATION_WORD = r"\s?\p{L}+", r"\s?\p{P}+"
# Not patterns: the library has its own splitters for these.
SINGLE_DIGITS, DIGIT_RUNS, PUNCTUATION = "each digit", "all digits", "punctuation"

# The pre-tokenizers of models that have several patterns, which apply one after the other.
DEEPSEEK_V3 = (THREE_NUMBERS, _DEEPSEEK_CJK, _DEEPSEEK_V3_WORDS)
DEEPSEEK_CODER = (
    *(_LINE_BREAK, _CASED_WORD, _PUNCTUATION_WORD, _DEEPSEEK_EAST_ASIAN),
    SINGLE_DIGITS,
)
DEEPSEEK_LLM = (
    *(_LINE_BREAK, _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, _FINAL_SPACES, _DEEPSEEK_EAST_ASIAN),
    SINGLE_DIGITS,
)
FALCON = (PUNCTUATION, GPT2)  # followed by FALCON_BYTES
FALCON_BYTES = (DIGIT_RUNS, ASCII_THREE_DIGITS)  # these split GPT-2's byte characters
MINICPM5 = (THREE_NUMBERS, _LLAMA3_NUMBERS)
VIKING = (BLOOM, NUMBER)

# Words and single other characters, each with the space before it, which is written as U+2581; that
# of word tokenizers, which are trained here.
WORDS = r"▁?[\p{L}\p{M}\p{N}_]+(?:['’][\p{L}\p{M}]+)*|▁?[^\s▁\p{L}\p{M}\p{N}_]|▁|\s"

LINE_STARTS = re.compile(r"(?<=\n)(?=\S)")  # after a line break, before a visible character
CUT_PATTERNS: dict[str, re.Pattern[str] | None] = {
    WORDS: LINE_STARTS,
    LLAMA3: LINE_STARTS,
    QWEN2: LINE_STARTS,
    QWEN35: LINE_STARTS,
    SEED_CODER: LINE_STARTS,
    BAILING: LINE_STARTS,
    JAIS2: LINE_STARTS,
    _LLAMA3_NUMBERS: LINE_STARTS,
    _DEEPSEEK_V3_WORDS: LINE_STARTS,
    _LINE_BREAK: LINE_STARTS,
    # A run of whitespace is one word at the end of the text, but two before a visible character:
    # this makes no difference only for a single line break.
    GPT2: re.compile(r"(?<=\S\n)(?=\S)"),
    # In a word a slash may follow a line break.
    O200K: re.compile(r"(?<=\n)(?=[^\s/])"),
    TEKKEN: re.compile(r"(?<=\n)(?=[^\s/])"),
    # Whitespace and punctuation between two words are one word.
    BLOOM: re.compile(r"(?<=\n)(?=[^\W_])"),
    # These split what another pattern does not cut.
    **dict.fromkeys((NUMBER, THREE_NUMBERS, ASCII_THREE_DIGITS, _DEEPSEEK_CJK)),
    **dict.fromkeys((_DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, _DEEPSEEK_EAST_ASIAN)),
    **dict.fromkeys((_CASED_WORD, _PUNCTUATION_WORD, _FINAL_SPACES)),
    **dict.fromkeys((SINGLE_DIGITS, DIGIT_RUNS, PUNCTUATION)),
}
# Patterns that match any text from end to end.
COVERING = frozenset((LLAMA3, GPT2, QWEN2, QWEN35, O200K, TEKKEN))
# The same matches in linear time: `\s+$` alone is quadratic in the length of a run of spaces.
FASTER = {_FINAL_SPACES: r"(?<!\s)\s+$"}
