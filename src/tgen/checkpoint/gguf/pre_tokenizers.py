"""llama.cpp's named pre-tokenizers: how a text is split into words before bytes are merged.

A GGUF file stores only the name. Listed are those that tgen can reproduce exactly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tgen.errors import TokenizerError
from tgen.tokenizer import Tokenizer
from tgen.tokenizer.patterns import GPT2, LLAMA3, QWEN2, SINGLE_DIGITS

TRANSFORMERS_HINT = "use --to transformers, which keeps it"


class PreTokenizer(NamedTuple):
    """One way of splitting a text into words."""

    patterns: tuple[str, ...]  # applied in order
    ignore_merges: bool = False  # a word that is a token is looked up, never merged
    nfc: bool = False  # its tokenizers compose characters (Unicode NFC) first


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "llama-bpe": PreTokenizer((LLAMA3,), ignore_merges=True),
    "smaug-bpe": PreTokenizer((LLAMA3,)),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "smollm": PreTokenizer((SINGLE_DIGITS, GPT2)),
}
ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "dbrx": "smaug-bpe",
    "starcoder": "smollm",
}


def find_name(tokenizer: Tokenizer) -> str:
    """Return llama.cpp's name of the pre-tokenizer; raises TokenizerError if none fits."""
    spec = tokenizer.spec
    if not spec.byte_level:
        raise TokenizerError(
            "a sentencepiece tokenizer cannot be written to GGUF",
            "use --to transformers; GGUF export supports byte-level BPE",
        )
    patterns = spec.patterns
    if patterns == () and not spec.ignore_merges and _within_characters(tokenizer):
        patterns = (GPT2,)  # no pattern splits a character
    names = [n for n, p in PRE_TOKENIZERS.items() if p.patterns == patterns and not spec.prefix]
    if not names:
        raise TokenizerError(
            "GGUF has no name for this pre-tokenizer",
            f"use one of {', '.join(PRE_TOKENIZERS)}, or tgen's own char or bpe tokenizer",
        )
    if spec.nfc != PRE_TOKENIZERS[names[0]].nfc:
        raise TokenizerError(
            f"GGUF has no name for {names[0]} {'with' if spec.nfc else 'without'} NFC",
            TRANSFORMERS_HINT,
        )
    for name in names:
        ignore_merges = PRE_TOKENIZERS[name].ignore_merges
        # If merges turn each token's text into that token, looking it up changes nothing.
        if ignore_merges == spec.ignore_merges or (
            ignore_merges and _merges_give_every_token(tokenizer)
        ):
            return name
    raise TokenizerError(
        f"GGUF's {names[0]} does not look up whole words, as this tokenizer does",
        TRANSFORMERS_HINT,
    )


def _merges_give_every_token(tokenizer: Tokenizer) -> bool:
    """Whether each token's text, if it is whole characters, is encoded as just that token."""
    texts = ((i, tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    whole = ((i, data) for i, data in texts if data.decode(errors="ignore").encode() == data)
    return all(tokenizer.encode(data) == [i] for i, data in whole if data)


def _within_characters(tokenizer: Tokenizer) -> bool:
    """Whether no token spans more than one character."""
    tokens = (tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    return all(byte & 0xC0 == 0x80 for token in tokens for byte in token[1:])


def pre_tokenizer_json(patterns: Sequence[str]) -> dict[str, Any]:
    """Return the `pre_tokenizer` object of tokenizer.json that splits by these patterns."""
    parts: list[dict[str, Any]] = []
    for pattern in patterns:
        if pattern == SINGLE_DIGITS:
            parts.append({"type": "Digits", "individual_digits": True})
        elif pattern != GPT2:
            regex = {"Regex": pattern}
            parts.append(
                {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
            )
    parts.append(byte_level_json(use_regex=GPT2 in patterns))
    return {"type": "Sequence", "pretokenizers": parts}


def byte_level_json(*, use_regex: bool) -> dict[str, Any]:
    """Return the part of tokenizer.json that maps bytes to characters."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }
