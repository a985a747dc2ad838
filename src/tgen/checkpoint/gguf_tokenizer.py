"""A byte-level BPE tokenizer in GGUF's fields, both ways: tokenizer.json <-> tokens and merges."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tgen.checkpoint import gguf_words
from tgen.errors import ModelError, TokenizerError
from tgen.tokenizer import Tokenizer

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
    described = json.loads(tokenizer.json)
    model = described["model"]
    added = {token["id"]: token for token in described.get("added_tokens") or []}
    names = {i: name for name, i in model["vocab"].items()}
    names |= {i: token["content"] for i, token in added.items()}
    tokens, types = [], []
    taken = set(names.values())
    for i in range(n_rows):
        tokens.append(names.get(i) or _unused_name(i, taken))
        kind = _UNUSED if i not in names else _NORMAL
        if i in added:
            kind = _CONTROL if added[i]["special"] else _USER_DEFINED
        types.append(kind)
    if not ends:
        raise TokenizerError(
            "the tokenizer has no token that ends a text",
            "llama.cpp needs one: name it as eos_token_id in config.json",
        )
    ids = dict(zip(("eos", "eot", "eom"), ends, strict=False))
    first = _first_token(described.get("post_processor"))
    add_bos = first is not None and first in taken
    if add_bos:
        bos = next(i for i, name in names.items() if name == first)
    ids |= {key: i for key, i in (("bos", bos), ("padding", pad)) if i is not None}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    merges = [merge for merge in merges if not merge.startswith("#version")]
    if not merges:  # llama.cpp needs one: this pair never stands side by side
        merges = [f"{tokens[ends[0]]} {tokens[ends[0]]}"]
    pre = gguf_words.name_of(described, tokenizer)
    return Vocabulary("gpt2", pre, tokens, types, merges, ids, add_bos, chat_template)


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
    pre = gguf_words.ALIASES.get(pre, pre) if isinstance(pre, str) else None
    if pre not in gguf_words.KNOWN:
        raise ModelError(
            f"its tokenizer cuts words by {fields.get('tokenizer.ggml.pre')!r}"[:200],
            f"tgen knows {', '.join([*gguf_words.KNOWN, *gguf_words.ALIASES])}",
        )
    tokens = _strings(fields, "tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(fields, "merges")]
    types = fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError("its tokens and their kinds do not fit", "the file is damaged")
    vocab = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED
    }
    kept = [list(m) for m in merges if len(m) == 2 and {*m, "".join(m)} <= vocab.keys()]
    named = {key: _id(fields, key, len(tokens)) for key in ("bos", "eos", "eot", "eom")}
    starts = fields.get("tokenizer.ggml.add_bos_token") is True and named["bos"] is not None
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, tokens[i], special=types[i] == _CONTROL)
            for i in sorted(vocab.values())
            if types[i] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if gguf_words.KNOWN[pre].nfc else None,
        "pre_tokenizer": gguf_words.pre_tokenizer(gguf_words.KNOWN[pre].cuts),
        "post_processor": _beginning(tokens[named["bos"]], named["bos"])
        if starts and named["bos"] is not None
        else None,
        "decoder": gguf_words.byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": gguf_words.KNOWN[pre].whole_words,
            "vocab": vocab,
            "merges": kept,
        },
    }
    ends = [named[key] for key in ("eos", "eot", "eom")]
    return json.dumps(described, ensure_ascii=False), [i for i in ends if i is not None]


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


def _first_token(processor: Mapping[str, Any] | None) -> str | None:
    """The special token that a post-processor puts before every text."""
    match processor:
        case {"type": "Sequence", "processors": list(parts)}:
            return next((name for name in map(_first_token, parts) if name is not None), None)
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": str(name)}}, *_]}:
            return name
    return None


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
