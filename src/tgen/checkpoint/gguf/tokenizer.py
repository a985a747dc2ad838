"""Tokenizers as GGUF fields, both ways: tokenizer.json <-> tokens, and merges or scores.

GGUF calls byte-level BPE "gpt2", and BPE like sentencepiece's, whose tokens have scores instead of
merges, "llama". There llama.cpp joins two neighbors if their text is a token: the token with the
highest score first, the leftmost pair if scores are equal. BPE with a merge for every split of
every token, ordered by the token's score, gives the same ids; transformers converts sentencepiece
models in this way, too.
"""

import json
import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, islice, repeat, zip_longest
from typing import Any
from unicodedata import normalize

from tgen.checkpoint.gguf import pre_tokenizers
from tgen.checkpoint.gguf.pre_tokenizers import tokenizer_error
from tgen.errors import ModelError, TokenizerError
from tgen.tokenizer import Tokenizer
from tgen.tokenizer.backend import MergesOfText
from tgen.tokenizer.patterns import O200K, TEKKEN
from tgen.tokenizer.tokenizer_json import BYTE_TOKENS, SPACE, AddedToken

_MAX_MERGES = 1 << 22  # Gemma's 262,144 tokens have an eighth
_MAX_CHARACTERS = 256  # of a token: the work grows with the square

Pair = tuple[str, str]


def merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[Pair]:
    """Return the merges of the tokens in `vocab`; `scores` are by id. Equal scores: by id.

    Raises ModelError for a token too long to be one, and for too many merges.
    """
    if longest := next((name for name in vocab if len(name) > _MAX_CHARACTERS), ""):
        raise ModelError(
            f"it has a token of {len(longest)} characters (limit {_MAX_CHARACTERS})",
            "use another model",
        )
    find = vocab.get
    splits = list(
        islice(
            (
                (-scores[i], i, left, right, name, k)
                for name, i in vocab.items()
                for k in range(1, len(name))
                if (left := find(name[:k])) is not None and (right := find(name[k:])) is not None
            ),
            _MAX_MERGES + 1,
        )
    )
    if len(splits) > _MAX_MERGES:
        raise ModelError(f"its tokens have more than {_MAX_MERGES:,} merges", "use another model")
    return [(name[:k], name[k:]) for *_, name, k in sorted(splits)]


def scores_of(
    vocab: Mapping[str, int], merges: Sequence[Pair], added: Collection[str]
) -> dict[str, float]:
    """Return the scores with which llama.cpp merges like `merges`; 0 for tokens not listed.

    tokenizer.json has no scores. Sentencepiece numbers tokens in the order in which it learned
    them, from 0 downward and characters last, and llama.cpp's converter copies these numbers from
    tokenizer.model: the rank of a token's first merge gives the same order. `added` tokens are
    never merged. Raises TokenizerError if no scores make llama.cpp merge in this way.
    """
    atomic = {*added, *BYTE_TOKENS}
    mergeable = {name: i for name, i in vocab.items() if name not in atomic}
    pairs = [p for p in merges if not atomic & {*p, "".join(p)}]
    ranked = dict.fromkeys(map("".join, pairs))
    order = [*ranked, *(name for name in mergeable if name not in ranked)]
    scores = {name: -float(rank) for rank, name in enumerate(order)}
    by_id = [0.0] * (max(vocab.values(), default=0) + 1)
    for name, score in scores.items():
        by_id[vocab[name]] = score
    expected = merges_by_score(mergeable, by_id)
    known = set(pairs)
    if more := next((pair for pair in expected if pair not in known), None):
        left, right = more
        raise tokenizer_error(f"llama.cpp would also merge {left!r} and {right!r}")
    # the order of one token's own pairs matters only where they overlap
    for pair, other in zip_longest(pairs, expected, fillvalue=("", "")):
        if "".join(pair) != "".join(other):
            raise tokenizer_error(f"GGUF cannot store the order of the merges of {''.join(pair)!r}")
    return scores


def check_words(vocab: Mapping[str, int]) -> None:
    """Raise TokenizerError if a token spans words, for a tokenizer that splits texts at spaces."""
    if spanning := next((name for name in vocab if SPACE in name[1:]), None):
        raise tokenizer_error(
            f"the token {spanning!r} spans words, at which llama.cpp does not split texts"
        )


def check_tokens(vocab: Mapping[str, int]) -> None:
    """Raise TokenizerError if llama.cpp cannot read a token, or stops at a byte without one."""
    if unreadable := next((name for name in vocab if "\0" in name), None):
        raise tokenizer_error(f"llama.cpp cannot read the token {unreadable!r}")
    for byte, name in enumerate(BYTE_TOKENS):
        if name not in vocab and (byte > 127 or chr(byte) not in vocab):
            raise tokenizer_error(f"llama.cpp needs a token {name}")


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # token types
_END_KEYS = ("eos", "eot", "eom")
_DAMAGED = "download the file again: it is damaged"
# Tokens that end a text in llama.cpp, whatever the file's fields say: many files name only one.
_END_NAMES = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("</s>", "<eos>", "<EOT>", "<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
}


def to_fields(
    tokenizer: Tokenizer,
    n_tokens: int,
    *,
    ends: Sequence[int],
    bos: int | None = None,
    pad: int | None = None,
    chat_template: str | None = None,
    name: str = "",
) -> dict[str, Any]:
    """Return the fields for a model with `n_tokens` tokens.

    `ends` are the end-of-text tokens, the main one first; `name` is the model's. Raises
    TokenizerError with the reason if llama.cpp would give other ids (see also
    `describe_difference`).
    """
    spec, start = tokenizer.spec, tokenizer.bos_ids
    for token in spec.added_tokens:
        _check_flags(tokenizer, token, name)
    if len(start) > 1:
        raise TokenizerError(
            f"GGUF cannot store {len(start)} tokens before a text", "use --to transformers"
        )
    ends = [i for i in ends if 0 <= i < n_tokens]
    if not ends:
        raise TokenizerError(
            "the tokenizer has no end-of-text token, which llama.cpp needs",
            "set eos_token_id in config.json",
        )
    if spec.word_end or spec.word_level or (spec.normalizers and not spec.byte_level):
        has_words = spec.word_end or spec.word_level
        what = "a tokenizer of words" if has_words else f"the normalizer {spec.normalizers[0]}"
        raise tokenizer_error(f"GGUF cannot store {what}")
    tokens, types = _tokens_and_types(tokenizer, n_tokens)
    ids: dict[str, int | None] = dict(zip(_END_KEYS, ends, strict=False))
    ids |= {"bos": start[0] if start else bos, "padding": pad}
    fields: dict[str, Any] = {"tokens": tokens, "token_type": types, "add_bos_token": bool(start)}
    if spec.byte_level:
        # llama.cpp needs at least one merge: this pair never occurs in a text
        merges = [" ".join(p) for p in tokenizer.merges()] or [
            f"{tokens[ends[0]]} {tokens[ends[0]]}"
        ]
        pre = pre_tokenizers.find_name(tokenizer)
        fields |= {"model": "gpt2", "pre": pre, "merges": merges}
    else:
        added = [token.content for token in spec.added_tokens]
        if spec.metaspace and spec.splits_words:
            check_words(spec.vocab)
        check_tokens(spec.vocab)
        scores = scores_of(spec.vocab, tokenizer.merges(), added)
        fields |= {"model": "llama", "pre": "default", "add_space_prefix": bool(spec.prefix)}
        fields["scores"] = [scores.get(token, 0.0) for token in tokens]
        ids["unknown"] = spec.vocab.get(_unknown_name(tokenizer) or "")
    for key, token_id in ids.items():
        if token_id is not None and 0 <= token_id < n_tokens:
            fields[f"{key}_token_id"] = token_id
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return fields | ({"tokenizer.chat_template": chat_template} if chat_template else {})


def name_to_write(tokenizer: Tokenizer, name: str) -> str:
    """Return the model's name; empty if llama.cpp would take the model for Phi-3 by it and drop
    the spaces after its added tokens."""
    strips = any(token.rstrip for token in tokenizer.spec.added_tokens)
    return name if strips or not _is_phi3(name) else ""


def describe_difference(tokenizer: Tokenizer) -> str:
    """Describe the texts for which llama.cpp's token ids differ; empty if none."""
    spec = tokenizer.spec
    if {O200K, TEKKEN} & set(spec.patterns):
        return "llama.cpp splits words with capital letters or marks outside ASCII in another way"
    if not spec.byte_level and spec.prefix and spec.metaspace:
        after = " or follows a control token" if spec.prefix == "first" else ""
        return f"llama.cpp puts one more space before a text that begins with a space{after}"
    if any(SPACE in token.content for token in spec.added_tokens):
        return f"llama.cpp splits the character {SPACE} and long runs of spaces in another way"
    return ""


def describe_missing_ends(tokenizer: Tokenizer, ends: Collection[int]) -> str:
    """Describe the end-of-text tokens after which llama.cpp continues; empty if none."""
    names = [tokenizer.id_to_token(i) for i in list(ends)[len(_END_KEYS) :]]
    missing = [name for name in names if name and name not in _END_NAMES]
    return f"llama.cpp does not end a text after {', '.join(missing)}" if missing else ""


def _check_flags(tokenizer: Tokenizer, token: AddedToken, name: str) -> None:
    """Raise TokenizerError unless llama.cpp finds the token where the tokenizer does: it looks for
    the characters of its name."""
    spec = tokenizer.spec
    if spec.byte_level:
        changed = bool(spec.normalizers) and not (spec.nfc and _stays_in_nfc(token.content))
    else:
        changed = not spec.metaspace and not token.special
    flags = {
        "lstrip": token.lstrip,
        "rstrip": token.rstrip != _strips_spaces(token.content, name),
        "single_word": token.single_word,
        "normalized": token.normalized and changed,
    }
    if flags["rstrip"] and not token.rstrip:
        raise TokenizerError(
            f"llama.cpp drops the spaces after the added token {token.content!r}"[:150]
            + ", as the model is named like Phi-3",
            "give it another name, or use --to transformers",
        )
    if unsupported := [flag for flag, value in flags.items() if value]:
        raise tokenizer_error(
            f"GGUF cannot store {unsupported[0]} of the added token {token.content!r}"
        )


def _stays_in_nfc(token: str) -> bool:
    """Whether Unicode's NFC changes neither a token nor its last character before a mark."""
    marks = [normalize("NFC", chr(mark)) for mark in range(0x300, 0x370)]
    return token.isascii() and all(normalize("NFC", token[-1] + m) == token[-1] + m for m in marks)


def _strips_spaces(token: str, model_name: str) -> bool:
    """Whether llama.cpp drops the spaces after an added token: it knows Phi-3 by its name."""
    return _is_phi3(model_name) and token not in ("<unk>", "<s>", "<|endoftext|>")


def _is_phi3(model_name: str) -> bool:
    return any(part in model_name.lower() for part in ("phi-3", "phi3"))


def _tokens_and_types(tokenizer: Tokenizer, n_tokens: int) -> tuple[list[str], list[int]]:
    spec = tokenizer.spec
    types = dict.fromkeys(spec.vocab.values(), _NORMAL)
    names = {i: name for name, i in tokenizer.token_ids.items()}
    for token in spec.added_tokens:
        types[token.id] = _CONTROL if token.special else _USER_DEFINED
    if not spec.byte_level:
        types |= {spec.vocab[name]: _BYTE for name in BYTE_TOKENS if name in spec.vocab}
        if (unknown := spec.vocab.get(_unknown_name(tokenizer) or "")) is not None:
            types[unknown] = _UNKNOWN
        for token in spec.added_tokens:  # llama.cpp looks for them before it replaces spaces
            if not token.special:
                names[token.id] = token.content.replace(SPACE, " ")
    used = set(names.values())
    tokens = [names.get(i) or _unused_name(i, used) for i in range(n_tokens)]
    return tokens, [types.get(i, _UNUSED) for i in range(n_tokens)]


def _unknown_name(tokenizer: Tokenizer) -> str | None:
    name: str | None = json.loads(tokenizer.json)["model"].get("unk_token")
    return name


def read(fields: Mapping[str, Any]) -> tuple[Tokenizer, list[int]]:
    """Return the tokenizer for a file's fields, and the end-of-text token ids; errors as
    `to_json`."""
    content, ends = _without_byte_level_merges(fields)
    merges_of_text = None
    if "merges" not in content["model"]:
        content["model"]["merges"] = []
        merges = _strings(fields, "merges")
        merges_of_text = MergesOfText(
            content["model"]["vocab"], lambda: map(str.split, merges, repeat(" "), repeat(1))
        )
    tokenizer = Tokenizer(
        content,
        parse_again=lambda: to_json(fields)[0],
        merges_of_text=merges_of_text,
        end_ids=ends,
    )
    return tokenizer, ends


def to_json(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return the content of tokenizer.json for a file's fields, and the end-of-text token ids.

    Raises ModelError for unsupported tokenizers and inconsistent lists.
    """
    content, ends = _without_byte_level_merges(fields)
    model = content["model"]
    if "merges" not in model:
        model["merges"] = _byte_level_merges(fields, model["vocab"])
    return content, ends


def _without_byte_level_merges(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return what `to_json` does, without the merges of byte-level BPE, which take the longest."""
    model = fields.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f"unsupported tokenizer type {model!r}"[:200],
            "use a model with byte-level BPE, which GGUF calls gpt2, or with sentencepiece's BPE, "
            "which it calls llama",
        )
    tokens = _strings(fields, "tokens")
    types = fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list | array) or len(types) != len(tokens):
        raise ModelError("its token types do not match its tokens", _DAMAGED)
    used: Sequence[int] = range(len(tokens))
    if _UNUSED in types or "" in tokens:
        used = [i for i in used if types[i] != _UNUSED and tokens[i]]
    vocab = dict(zip(map(tokens.__getitem__, used), used, strict=True))
    if len(vocab) < len(used):
        twice = next(tokens[i] for i in used if vocab[tokens[i]] != i)
        raise ModelError(f"it has two tokens named {twice!r}"[:200], _DAMAGED)
    # llama.cpp's defaults for sentencepiece models are Llama 2's
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if model == "llama" else {}
    ids = {
        key: _token_id(fields, key, len(tokens), defaults.get(key))
        for key in ("bos", "eos", "eot", "eom", "unknown")
    }
    name = fields.get("general.name")
    added = [
        _added_token_json(i, tokens[i], types[i], name if isinstance(name, str) else "")
        for i in used
        if types[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    if model == "gpt2":
        parts, add_bos = _byte_level_parts(fields, vocab)
    else:
        atomic = {token["content"] for token in added}
        parts = _sentencepiece_parts(fields, vocab, types, atomic)
        unknown = ids["unknown"]
        if unknown is not None and types[unknown] != _UNUSED:
            parts["model"]["unk_token"] = tokens[unknown]
        add_bos = True
    bos = ids["bos"]
    add_bos = fields.get("tokenizer.ggml.add_bos_token", add_bos) is True
    tokenizer_json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "post_processor": bos_json(tokens[bos], bos) if add_bos and bos is not None else None,
        **parts,
    }
    ends = [end for key in _END_KEYS if (end := ids[key]) is not None]
    ends += [token["id"] for token in added if token["content"] in _END_NAMES]
    return tokenizer_json, list(dict.fromkeys(ends))


def _byte_level_merges(
    fields: Mapping[str, Any], vocab: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """Return the pairs whose tokens and result are in the vocabulary."""
    pairs = [tuple(merge.split(" ", 1)) for merge in _strings(fields, "merges")]
    has = vocab.__contains__
    if not all(map(has, chain(chain.from_iterable(pairs), map("".join, pairs)))):
        pairs = [pair for pair in pairs if has("".join(pair)) and all(map(has, pair))]
    return [pair for pair in pairs if len(pair) == 2]


def _byte_level_parts(
    fields: Mapping[str, Any], vocab: Mapping[str, int]
) -> tuple[dict[str, Any], bool]:
    """Return the parts of tokenizer.json of byte-level BPE without merges, and the default of
    add_bos_token."""
    pre = fields.get("tokenizer.ggml.pre")
    name = pre_tokenizers.ALIASES.get(pre, pre) if isinstance(pre, str) else None
    if name not in pre_tokenizers.PRE_TOKENIZERS:
        raise ModelError(
            f"unsupported pre-tokenizer {pre!r}"[:200],
            f"use a model with one of {', '.join(pre_tokenizers.PRE_TOKENIZERS)}",
        )
    pre_tokenizer = pre_tokenizers.PRE_TOKENIZERS[name]
    model = model_json(vocab) | {"ignore_merges": pre_tokenizer.ignore_merges}
    parts = {
        "normalizer": {"type": "NFC"} if pre_tokenizer.nfc else None,
        "pre_tokenizer": pre_tokenizers.pre_tokenizer_json(pre_tokenizer),
        "decoder": pre_tokenizers.byte_level_json(use_regex=True),
        "model": model,
    }
    return parts, pre_tokenizer.add_bos


def _sentencepiece_parts(
    fields: Mapping[str, Any], vocab: Mapping[str, int], types: Sequence[int], atomic: set[str]
) -> dict[str, Any]:
    """Return the parts of tokenizer.json, as in Llama 2's; `atomic` tokens are not merged."""
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list | array):
        raise ModelError("its tokenizer has no list of scores", "export it with a vocabulary")
    numbers = [score for score in scores if isinstance(score, int | float)]
    if not len(numbers) == len(scores) == len(types) or not all(map(math.isfinite, numbers)):
        raise ModelError("its scores do not match its tokens", _DAMAGED)
    mergeable = {n: i for n, i in vocab.items() if types[i] != _BYTE and n not in atomic}
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True) is True
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    merges = merges_by_score(mergeable, numbers)
    model = {"fuse_unk": True, "byte_fallback": True, "merges": merges}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model_json(vocab) | model,
    }


def model_json(vocab: Mapping[str, int]) -> dict[str, Any]:
    """Return the `model` object of tokenizer.json, without merges."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
    }


def _added_token_json(i: int, content: str, token_type: int, model_name: str) -> dict[str, Any]:
    special = token_type != _USER_DEFINED or content in _END_NAMES
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    flags["rstrip"] = _strips_spaces(content, model_name)
    return {"id": i, "content": content, **flags, "special": special}


def bos_json(token: str, i: int) -> dict[str, Any]:
    """Return the `post_processor` of tokenizer.json that puts one token before every text."""
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
    if not isinstance(strings, list) or not set(map(type, strings)) <= {str}:
        raise ModelError(f"its tokenizer has no list of {key}", "export it with a vocabulary")
    return strings


def _token_id(
    fields: Mapping[str, Any], key: str, n_tokens: int, default: int | None
) -> int | None:
    i = fields.get(f"tokenizer.ggml.{key}_token_id", default)
    return i if type(i) is int and 0 <= i < n_tokens else None
