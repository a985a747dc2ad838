"""A byte-level BPE tokenizer in GGUF's fields, both ways: tokenizer.json <-> tokens and merges."""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tgen.checkpoint.gguf import pre_tokenizers
from tgen.errors import ModelError, TokenizerError
from tgen.tokenizer import Tokenizer
from tgen.tokenizer.spec import Added

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # kinds of tokens


class Vocabulary(NamedTuple):
    """What GGUF keeps of a tokenizer."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    ids: dict[str, int]  # bos, eos, ...
    add_bos: bool
    chat_template: str | None


def to_fields(
    tokenizer: Tokenizer,
    n_rows: int,
    *,
    ends: Sequence[int],
    bos: int | None = None,
    pad: int | None = None,
    chat_template: str | None = None,
) -> Vocabulary:
    """The fields for a model with `n_rows` tokens. Of `ends`, those that end a text, the first is
    the main one.

    Raises TokenizerError, saying why, where llama.cpp would not give the same ids.
    """
    layout, start = tokenizer.layout, tokenizer.start
    for token in layout.added:
        _check_added(token, nfc=layout.nfc)
    if len(start) > 1:
        raise TokenizerError(
            f"the tokenizer puts {len(start)} tokens before a text", "GGUF has place for one"
        )
    special = {token.id: token.special for token in layout.added}
    names = {i: name for name, i in (layout.vocab | tokenizer.added).items()}
    tokens, types = [], []
    taken = set(names.values())
    for i in range(n_rows):
        tokens.append(names.get(i) or _unused_name(i, taken))
        kind = _UNUSED if i not in names else _NORMAL
        if i in special:
            kind = _CONTROL if special[i] else _USER_DEFINED
        types.append(kind)
    ends = [i for i in ends if 0 <= i < n_rows]
    if not ends:
        raise TokenizerError(
            "the tokenizer has no token that ends a text",
            "llama.cpp needs one: name it as eos_token_id in config.json",
        )
    ids = dict(zip(("eos", "eot", "eom"), ends, strict=False))
    named = (("bos", start[0] if start else bos), ("padding", pad))
    ids |= {key: i for key, i in named if i is not None and 0 <= i < n_rows}
    # llama.cpp needs one: this last pair never stands side by side
    merges = [" ".join(m) for m in layout.merges] or [f"{tokens[ends[0]]} {tokens[ends[0]]}"]
    pre = pre_tokenizers.name_of(tokenizer)
    return Vocabulary("gpt2", pre, tokens, types, merges, ids, bool(start), chat_template)


def to_json(fields: Mapping[str, Any]) -> tuple[str, list[int]]:
    """tokenizer.json's text from a file's fields, and the ids of the tokens that end a text.

    Raises ModelError for a kind of tokenizer that tgen does not know, or lists that do not fit.
    """
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ModelError(
            f"its tokenizer is of kind {model!r}"[:200],
            "tgen reads byte-level BPE, which GGUF calls gpt2",
        )
    pre = pre_tokenizers.ALIASES.get(pre, pre) if isinstance(pre, str) else None
    if pre not in pre_tokenizers.KNOWN:
        raise ModelError(
            f"its tokenizer cuts words by {fields.get('tokenizer.ggml.pre')!r}"[:200],
            f"tgen knows {', '.join([*pre_tokenizers.KNOWN, *pre_tokenizers.ALIASES])}",
        )
    tokens = _strings(fields, "tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(fields, "merges")]
    types = fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list | array) or len(types) != len(tokens):
        raise ModelError("its tokens and their kinds do not fit", "the file is damaged")
    vocab: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != _UNUSED and vocab.setdefault(token, i) != i:
            raise ModelError(f"it has two tokens named {token!r}"[:200], "the file is damaged")
    kept = [list(m) for m in merges if len(m) == 2 and {*m, "".join(m)} <= vocab.keys()]
    named = {key: _id(fields, key, len(tokens)) for key in ("bos", "eos", "eot", "eom")}
    starts = fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") is True
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, tokens[i], special=types[i] == _CONTROL)
            for i in sorted(vocab.values())
            if types[i] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre_tokenizers.KNOWN[pre].nfc else None,
        "pre_tokenizer": pre_tokenizers.pre_tokenizer(pre_tokenizers.KNOWN[pre].cuts),
        "post_processor": _beginning(tokens[named["bos"]], named["bos"])
        if starts and named["bos"] is not None
        else None,
        "decoder": pre_tokenizers.byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizers.KNOWN[pre].whole_words,
            "vocab": vocab,
            "merges": kept,
        },
    }
    ends = [named[key] for key in ("eos", "eot", "eom")]
    return json.dumps(described, ensure_ascii=False), [i for i in ends if i is not None]


def _check_added(token: Added, *, nfc: bool) -> None:
    """Raises TokenizerError for one that is not looked for just as it is written."""
    flags = ("lstrip", "rstrip", "single_word", *(["normalized"] if nfc else []))
    if found := [flag for flag in flags if getattr(token, flag)]:
        raise TokenizerError(
            f"GGUF has no place for {found[0]} of the added token {token.content!r}"[:200],
            "--to transformers keeps it",
        )


def _added(i: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, **flags, "special": special}


def _beginning(token: str, i: int) -> dict[str, Any]:
    """A post-processor that puts one token before every text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }


def _unused_name(i: int, taken: set[str]) -> str:
    name = f"[PAD{i}]"
    while name in taken:
        name += "]"
    return name


def _strings(fields: Mapping[str, Any], key: str) -> list[str]:
    found = fields.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ModelError(
            f"it has no list of {key} for its tokenizer", "export it with a vocabulary"
        )
    return found


def _id(fields: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    found = fields.get(f"tokenizer.ggml.{key}_token_id")
    return found if type(found) is int and 0 <= found < n_tokens else None
