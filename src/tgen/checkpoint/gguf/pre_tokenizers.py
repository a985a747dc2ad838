"""llama.cpp's named pre-tokenizers: how a text is split into words before bytes are merged.

A GGUF file stores only the name. Listed are those that tgen can reproduce exactly.
"""

from typing import Any, NamedTuple

from tgen.errors import TokenizerError, UsageError
from tgen.tokenizer import Tokenizer
from tgen.tokenizer.patterns import (
    BAILING,
    BLOOM,
    DEEPSEEK_CODER,
    DEEPSEEK_LLM,
    DEEPSEEK_V3,
    DIGIT_RUNS,
    FALCON,
    FALCON_BYTES,
    GPT2,
    JAIS2,
    LLAMA3,
    MINICPM5,
    NUMBER,
    O200K,
    PUNCTUATION,
    QWEN2,
    QWEN35,
    SEED_CODER,
    SINGLE_DIGITS,
    TEKKEN,
    VIKING,
)


class PreTokenizer(NamedTuple):
    """One way of splitting a text into words."""

    patterns: tuple[str, ...]  # applied in order
    byte_patterns: tuple[str, ...] = ()  # applied to the byte characters afterwards
    ignore_merges: bool = False  # a word that is a token is looked up, never merged
    nfc: bool = False  # its tokenizers compose characters (Unicode NFC) first
    add_bos: bool = False  # llama.cpp's default of `add_bos_token`


# llama.cpp never normalizes: where its names for the same patterns are used with and without NFC,
# as "gpt-2" and "olmo", tgen follows the tokenizers of the models that the names stand for.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "olmo": PreTokenizer((GPT2,), nfc=True),
    "llama-bpe": PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    "smaug-bpe": PreTokenizer((LLAMA3,)),
    "glm4": PreTokenizer((LLAMA3,), ignore_merges=True),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "stablelm2": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer((QWEN35,), nfc=True),
    "smollm": PreTokenizer((SINGLE_DIGITS, GPT2)),
    "gpt-4o": PreTokenizer((O200K,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-v3": PreTokenizer(DEEPSEEK_V3),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "falcon": PreTokenizer(FALCON, FALCON_BYTES),
    "bloom": PreTokenizer((BLOOM,)),
    "viking": PreTokenizer(VIKING),
    "seed-coder": PreTokenizer((SEED_CODER,)),
    "bailingmoe": PreTokenizer((BAILING,)),
    "jais-2": PreTokenizer((JAIS2,)),
    "minicpm5": PreTokenizer(MINICPM5, ignore_merges=True),
}
_SAME = {
    "gpt-2": "phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe "
    "gigachat a.x-4.0 mellum modern-bert exaone4 jais trillion granite-docling",
    "olmo": "mpt",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "smaug-bpe": "dbrx chatglm-bpe",
    "glm4": "glm5",
    "stablelm2": "deepseek-r1-qwen hunyuan solar-open grok-2 megrez kormo f2llmv2",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bloom": "poro-chat gpt3-finnish",
    "bailingmoe": "bailingmoe2 llada-moe",
}
ALIASES = {alias: name for name, aliases in _SAME.items() for alias in aliases.split()}


def tokenizer_error(reason: str) -> TokenizerError:
    """Return the error of a tokenizer that llama.cpp would not use as it is."""
    return TokenizerError(reason[:200], "use --to transformers, which keeps it")


def find_name(tokenizer: Tokenizer) -> str:
    """Return llama.cpp's name of the pre-tokenizer; raises TokenizerError if none fits."""
    spec = tokenizer.spec
    patterns = _same_digits(spec.patterns)
    if patterns == () and not spec.ignore_merges and _within_characters(tokenizer):
        patterns = (GPT2,)  # no pattern splits a character
    split = (patterns, spec.byte_patterns)
    names = [n for n, p in PRE_TOKENIZERS.items() if _split(p) == split and not spec.prefix]
    if not names:
        raise TokenizerError(
            "GGUF has no name for this pre-tokenizer",
            "use --to transformers, or tgen's own char or bpe tokenizer",
        )
    normalizers = ("NFC",) if spec.nfc else ()
    fitting = [name for name in names if PRE_TOKENIZERS[name].nfc == spec.nfc]
    if spec.normalizers != normalizers or not fitting:
        with_or_without = (
            f"with {', '.join(spec.normalizers)}" if spec.normalizers else "without NFC"
        )
        raise tokenizer_error(f"GGUF has no name for {names[0]} {with_or_without}")
    for name in fitting:
        # If merges turn each token's text into that token, looking it up changes nothing.
        if PRE_TOKENIZERS[name].ignore_merges == spec.ignore_merges or _merges_give_every_token(
            tokenizer
        ):
            return name
    lookup = "does not look up" if spec.ignore_merges else "looks up"
    kept = "does" if spec.ignore_merges else "does not"
    raise tokenizer_error(f"GGUF's {fitting[0]} {lookup} whole words, as this tokenizer {kept}")


def _split(pre_tokenizer: PreTokenizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _same_digits(pre_tokenizer.patterns), pre_tokenizer.byte_patterns


def _same_digits(patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(SINGLE_DIGITS if pattern == NUMBER else pattern for pattern in patterns)


def _merges_give_every_token(tokenizer: Tokenizer) -> bool:
    """Whether each token's text, if it is whole characters, is encoded as just that token."""
    texts = ((i, tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    whole = ((i, data) for i, data in texts if data.decode(errors="ignore").encode() == data)
    try:
        return all(tokenizer.encode(data) == [i] for i, data in whole if data)
    except UsageError:  # the vocabulary lacks a byte of a token
        return False


def _within_characters(tokenizer: Tokenizer) -> bool:
    """Whether no token spans more than one character."""
    tokens = (tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    return all(byte & 0xC0 == 0x80 for token in tokens for byte in token[1:])


def pre_tokenizer_json(pre_tokenizer: PreTokenizer) -> dict[str, Any]:
    """Return the `pre_tokenizer` object of tokenizer.json that splits in this way."""
    *first, last = pre_tokenizer.patterns
    use_regex = last == GPT2  # ByteLevel has this pattern
    before = first if use_regex else [*first, last]
    parts = [
        *map(_splitter_json, before),
        byte_level_json(use_regex=use_regex),
        *map(_splitter_json, pre_tokenizer.byte_patterns),
    ]
    return {"type": "Sequence", "pretokenizers": parts}


def _splitter_json(pattern: str) -> dict[str, Any]:
    if pattern in (SINGLE_DIGITS, DIGIT_RUNS):
        return {"type": "Digits", "individual_digits": pattern == SINGLE_DIGITS}
    if pattern == PUNCTUATION:
        return {"type": "Punctuation", "behavior": "Contiguous"}
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def byte_level_json(*, use_regex: bool) -> dict[str, Any]:
    """Return the part of tokenizer.json that maps bytes to characters."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }
