"""Names for how a tokenizer cuts a text into words before it merges bytes.

llama.cpp knows the ways by their names alone. Here are those that tgen can say exactly.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tgen.errors import TokenizerError
from tgen.tokenizer import WORDS, Tokenizer

_GPT2 = "GPT-2's words"
_DIGITS = "single digits"
_QWEN2 = WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


class Words(NamedTuple):
    """One way to cut texts into words."""

    cuts: tuple[str, ...]  # one after the other
    whole_words: bool = False  # a word that is a token is never put together by merges
    nfc: bool = False  # whose tokenizers compose characters before all else


KNOWN = {
    "gpt-2": Words((_GPT2,)),
    "llama-bpe": Words((WORDS,), whole_words=True),
    "smaug-bpe": Words((WORDS,)),
    "qwen2": Words((_QWEN2,), nfc=True),
    "smollm": Words((_DIGITS, _GPT2)),
}
ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "dbrx": "smaug-bpe",
    "starcoder": "smollm",
}


def name_of(described: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The name for how a tokenizer cuts texts; raises TokenizerError if there is none."""
    if (described.get("decoder") or {}).get("type") != "ByteLevel":
        raise TokenizerError(
            "its tokenizer is of sentencepiece's kind", "tgen writes byte-level BPE to GGUF"
        )
    whole_words = bool(described["model"].get("ignore_merges"))
    cuts = _cuts(described.get("pre_tokenizer"))
    if cuts == () and not whole_words and _inside_characters(tokenizer):
        return "gpt-2"  # no cut of any kind goes through a character
    found = [name for name, pre in KNOWN.items() if pre.cuts == cuts]
    if not found:
        raise TokenizerError(
            "GGUF has no name for how this tokenizer cuts texts into words",
            f"it has one for {', '.join(KNOWN)}, and for tgen's own, char and bpe",
        )
    normalizer = described.get("normalizer")
    if normalizer is not None and not (KNOWN[found[0]].nfc and normalizer == {"type": "NFC"}):
        raise TokenizerError(
            f"GGUF has no place for the tokenizer's normalizer {normalizer.get('type')}",
            "--to transformers keeps it",
        )
    for name in found:
        whole = KNOWN[name].whole_words
        # Where merges make each token out of its own text, looking it up whole changes nothing.
        if whole == whole_words or (whole and _merges_make_all(tokenizer)):
            return name
    raise TokenizerError(
        f"GGUF's {found[0]} does not look whole words up, as this tokenizer does",
        "--to transformers keeps it",
    )


def _merges_make_all(tokenizer: Tokenizer) -> bool:
    """Whether each token's text, where it is whole characters, is cut into just that token."""
    spelled = ((i, tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    whole = ((i, data) for i, data in spelled if data.decode(errors="ignore").encode() == data)
    return all(tokenizer.encode(data) == [i] for i, data in whole if data)


def _cuts(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """What a pre_tokenizer cuts by, in order; None: by something that is not known here."""
    if pre_tokenizer is None:
        return ()
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            inner = [_cuts(part) for part in parts]
            return None if None in inner else tuple(cut for cuts in inner if cuts for cut in cuts)
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return None
        case {"type": "ByteLevel"}:
            return (_GPT2,) if pre_tokenizer.get("use_regex", True) else ()
        case {"type": "Digits", "individual_digits": True}:
            return (_DIGITS,)
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"}:
            return None if pre_tokenizer.get("invert") else (regex,)
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Removed"}:
            return (regex,) if pre_tokenizer.get("invert") else None
    return None


def _inside_characters(tokenizer: Tokenizer) -> bool:
    """Whether every token is of one character at most."""
    tokens = (tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    return all(byte & 0xC0 == 0x80 for token in tokens for byte in token[1:])


def pre_tokenizer(cuts: Sequence[str]) -> dict[str, Any]:
    """tokenizer.json's part that makes these cuts."""
    parts: list[dict[str, Any]] = []
    for cut in cuts:
        if cut == _DIGITS:
            parts.append({"type": "Digits", "individual_digits": True})
        elif cut != _GPT2:
            pattern = {"Regex": cut}
            parts.append(
                {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            )
    parts.append(byte_level(use_regex=_GPT2 in cuts))
    return {"type": "Sequence", "pretokenizers": parts}


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    """tokenizer.json's part that writes bytes as characters."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }
