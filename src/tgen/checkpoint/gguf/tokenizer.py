"""Byte-level BPE tokenizers as GGUF fields, both ways: tokenizer.json <-> tokens and merges."""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tgen.checkpoint.gguf import pre_tokenizers
from tgen.errors import ModelError, TokenizerError
from tgen.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # token types
_DAMAGED = "download the file again: it is damaged"


def to_fields(
    tokenizer: Tokenizer,
    n_tokens: int,
    *,
    ends: Sequence[int],
    bos: int | None = None,
    pad: int | None = None,
    chat_template: str | None = None,
) -> dict[str, Any]:
    """Return the fields for a model with `n_tokens` tokens.

    `ends` are the end-of-text tokens, the main one first. Raises TokenizerError with the reason if
    llama.cpp would give other ids.
    """
    spec, start = tokenizer.spec, tokenizer.bos_ids
    for token in spec.added_tokens:  # llama.cpp looks for them exactly as they are written
        flags = ("lstrip", "rstrip", "single_word", *(["normalized"] if spec.nfc else []))
        if unsupported := [flag for flag in flags if getattr(token, flag)]:
            raise TokenizerError(
                f"GGUF cannot store {unsupported[0]} of the added token {token.content!r}"[:200],
                pre_tokenizers.TRANSFORMERS_HINT,
            )
    if len(start) > 1:
        raise TokenizerError(
            f"GGUF cannot store {len(start)} tokens before a text", "use --to transformers"
        )
    special = {token.id: token.special for token in spec.added_tokens}
    names = {i: name for name, i in (spec.vocab | tokenizer.added_tokens).items()}
    tokens, types = [], []
    used = set(names.values())
    for i in range(n_tokens):
        tokens.append(names.get(i) or _unused_name(i, used))
        token_type = _UNUSED if i not in names else _NORMAL
        if i in special:
            token_type = _CONTROL if special[i] else _USER_DEFINED
        types.append(token_type)
    ends = [i for i in ends if 0 <= i < n_tokens]
    if not ends:
        raise TokenizerError(
            "the tokenizer has no end-of-text token, which llama.cpp needs",
            "set eos_token_id in config.json",
        )
    ids: dict[str, int | None] = dict(zip(("eos", "eot", "eom"), ends, strict=False))
    ids |= {"bos": start[0] if start else bos, "padding": pad}
    # llama.cpp needs at least one merge: this pair never occurs in a text
    merges = [" ".join(pair) for pair in spec.merges] or [f"{tokens[ends[0]]} {tokens[ends[0]]}"]
    pre = pre_tokenizers.find_name(tokenizer)
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": bool(start),
    }
    for key, token_id in ids.items():
        if token_id is not None and 0 <= token_id < n_tokens:
            fields[f"tokenizer.ggml.{key}_token_id"] = token_id
    return fields | ({"tokenizer.chat_template": chat_template} if chat_template else {})


def to_json(fields: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return tokenizer.json for a file's fields, and the end-of-text token ids.

    Raises ModelError for unsupported tokenizers and inconsistent lists.
    """
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ModelError(
            f"unsupported tokenizer type {model!r}"[:200],
            "use a model with byte-level BPE, which GGUF calls gpt2",
        )
    name = pre_tokenizers.ALIASES.get(pre, pre) if isinstance(pre, str) else None
    if name not in pre_tokenizers.PRE_TOKENIZERS:
        raise ModelError(
            f"unsupported pre-tokenizer {pre!r}"[:200],
            f"use one of {', '.join([*pre_tokenizers.PRE_TOKENIZERS, *pre_tokenizers.ALIASES])}",
        )
    pre_tokenizer = pre_tokenizers.PRE_TOKENIZERS[name]
    tokens, merges = _strings(fields, "tokens"), _strings(fields, "merges")
    types = fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list | array) or len(types) != len(tokens):
        raise ModelError("its token types do not match its tokens", _DAMAGED)
    vocab: dict[str, int] = {}
    for i, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type != _UNUSED and vocab.setdefault(token, i) != i:
            raise ModelError(f"it has two tokens named {token!r}"[:200], _DAMAGED)
    pairs = [merge.split(" ", 1) for merge in merges]
    ids = {key: _token_id(fields, key, len(tokens)) for key in ("bos", "eos", "eot", "eom")}
    bos = ids["bos"]
    add_bos = fields.get("tokenizer.ggml.add_bos_token", name == "llama-bpe") is True
    tokenizer_json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token_json(i, tokens[i], special=types[i] == _CONTROL)
            for i in sorted(vocab.values())
            if types[i] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre_tokenizer.nfc else None,
        "pre_tokenizer": pre_tokenizers.pre_tokenizer_json(pre_tokenizer.patterns),
        "post_processor": _bos_json(tokens[bos], bos) if add_bos and bos is not None else None,
        "decoder": pre_tokenizers.byte_level_json(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.ignore_merges,
            "vocab": vocab,
            "merges": [p for p in pairs if len(p) == 2 and {*p, "".join(p)} <= vocab.keys()],
        },
    }
    ends = [end for key in ("eos", "eot", "eom") if (end := ids[key]) is not None]
    return json.dumps(tokenizer_json, ensure_ascii=False), ends


def _added_token_json(i: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, **flags, "special": special}


def _bos_json(token: str, i: int) -> dict[str, Any]:
    """A post-processor that puts one token before every text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }


def _unused_name(i: int, used: set[str]) -> str:
    name = f"[PAD{i}]"
    while name in used:
        name += "]"
    return name


def _strings(fields: Mapping[str, Any], key: str) -> list[str]:
    strings = fields.get(f"tokenizer.ggml.{key}")
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise ModelError(f"its tokenizer has no list of {key}", "export it with a vocabulary")
    return strings


def _token_id(fields: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    i = fields.get(f"tokenizer.ggml.{key}_token_id")
    return i if type(i) is int and 0 <= i < n_tokens else None
