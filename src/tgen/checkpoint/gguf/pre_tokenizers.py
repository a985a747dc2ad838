"""Names for how a tokenizer cuts a text into words before it merges bytes.

llama.cpp knows the ways by their names alone. Here are those that tgen can say exactly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tgen.errors import TokenizerError
from tgen.tokenizer import Tokenizer
from tgen.tokenizer.patterns import DIGIT, GPT2, QWEN2, WORDS

_KEPT = "--to transformers keeps it"


class Words(NamedTuple):
    """One way to cut texts into words."""

    cuts: tuple[str, ...]  # one after the other
    whole_words: bool = False  # a word that is a token is never put together by merges
    nfc: bool = False  # whose tokenizers compose characters before all else


KNOWN = {
    "gpt-2": Words((GPT2,)),
    "llama-bpe": Words((WORDS,), whole_words=True),
    "smaug-bpe": Words((WORDS,)),
    "qwen2": Words((QWEN2,), nfc=True),
    "smollm": Words((DIGIT, GPT2)),
}
ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "dbrx": "smaug-bpe",
    "starcoder": "smollm",
}


def name_of(tokenizer: Tokenizer) -> str:
    """The name for how a tokenizer cuts texts; raises TokenizerError if there is none."""
    layout = tokenizer.layout
    if not layout.byte_level:
        raise TokenizerError(
            "its tokenizer is of sentencepiece's kind", "tgen writes byte-level BPE to GGUF"
        )
    cuts, whole_words = layout.splits, layout.ignore_merges
    if cuts == () and not whole_words and _inside_characters(tokenizer):
        cuts = (GPT2,)  # no cut of any kind goes through a character
    found = [name for name, pre in KNOWN.items() if pre.cuts == cuts and not layout.prefix]
    if not found:
        raise TokenizerError(
            "GGUF has no name for how this tokenizer cuts texts into words",
            f"it has one for {', '.join(KNOWN)}, and for tgen's own, char and bpe",
        )
    if layout.nfc != KNOWN[found[0]].nfc:
        raise TokenizerError(
            f"GGUF has no name for {found[0]} {'with' if layout.nfc else 'without'} NFC", _KEPT
        )
    for name in found:
        whole = KNOWN[name].whole_words
        # Where merges make each token out of its own text, looking it up whole changes nothing.
        if whole == whole_words or (whole and _merges_make_all(tokenizer)):
            return name
    raise TokenizerError(
        f"GGUF's {found[0]} does not look whole words up, as this tokenizer does", _KEPT
    )


def _merges_make_all(tokenizer: Tokenizer) -> bool:
    """Whether each token's text, where it is whole characters, is cut into just that token."""
    spelled = ((i, tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    whole = ((i, data) for i, data in spelled if data.decode(errors="ignore").encode() == data)
    return all(tokenizer.encode(data) == [i] for i, data in whole if data)


def _inside_characters(tokenizer: Tokenizer) -> bool:
    """Whether every token is of one character at most."""
    tokens = (tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    return all(byte & 0xC0 == 0x80 for token in tokens for byte in token[1:])


def pre_tokenizer(cuts: Sequence[str]) -> dict[str, Any]:
    """tokenizer.json's part that makes these cuts."""
    parts: list[dict[str, Any]] = []
    for cut in cuts:
        if cut == DIGIT:
            parts.append({"type": "Digits", "individual_digits": True})
        elif cut != GPT2:
            pattern = {"Regex": cut}
            parts.append(
                {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            )
    parts.append(byte_level(use_regex=GPT2 in cuts))
    return {"type": "Sequence", "pretokenizers": parts}


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    """tokenizer.json's part that writes bytes as characters."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }
