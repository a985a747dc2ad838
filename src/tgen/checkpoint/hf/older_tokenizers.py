"""Tokenizers in files older than tokenizer.json: vocab.json with merges.txt, and tokenizer.model.

They become the content of a tokenizer.json, as transformers converts them. A tokenizer.model is a
message of Protocol Buffers, sentencepiece_model.proto; its few fields are read here.
"""

import struct
from collections.abc import Iterator, Mapping
from operator import index
from pathlib import Path
from typing import Any

from tgen.checkpoint.chat_template import SPECIAL_TOKENS, token_text
from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, byte_level_json, pre_tokenizer_json
from tgen.checkpoint.git_lfs import reject_lfs_pointer
from tgen.checkpoint.hf.config import read_json_object
from tgen.errors import ModelError, TokenizerError
from tgen.storage import files
from tgen.tokenizer.tokenizer_json import SPACE

VOCAB, MERGES, SENTENCEPIECE = "vocab.json", "merges.txt", "tokenizer.model"
_LIMIT = 16 << 20  # bytes of a file
# Classes of tokenizer_config.json that have a vocab.json, and the pre-tokenizer of each in GGUF.
_CLASSES = {
    "GPT2Tokenizer": "gpt-2",
    "CodeGenTokenizer": "gpt-2",
    "GPTNeoXTokenizer": "olmo",
    "Qwen2Tokenizer": "qwen2",
}
_QWEN_TYPES = ("qwen2", "qwen3")  # of config.json
_MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_DAMAGED = "download the file again: it is damaged"
_USER_DEFINED = 4  # type of a piece that is matched verbatim
_BPE = 2  # of sentencepiece's model types
_KINDS = {1: "Unigram", 3: "words", 4: "characters"}


def has_older_tokenizer(path: Path) -> bool:
    """Return whether a directory has one of the older forms."""
    return all((path / n).exists() for n in (VOCAB, MERGES)) or (path / SENTENCEPIECE).exists()


def read_older_tokenizer(path: Path, model_type: object) -> dict[str, Any]:
    """Return the content of a tokenizer.json for a directory that has an older form.

    Raises ModelError for damaged files, TokenizerError for kinds that tgen does not support.
    """
    config = _read_json(path / "tokenizer_config.json")
    if (path / VOCAB).exists() and (path / MERGES).exists():
        content = _read_vocab_and_merges(path, config, model_type)
        adds_bos = config.get("add_bos_token", False)
    else:
        content = _read_sentencepiece(path / SENTENCEPIECE, config)
        adds_bos = config.get("add_bos_token", True)
    vocab = content["model"]["vocab"]
    content["added_tokens"] = _added_tokens(path, config, vocab, content["added_tokens"])
    ids = vocab | {token["content"]: token["id"] for token in content["added_tokens"]}
    bos = token_text(config.get("bos_token")) or token_text(
        _read_json(path / "special_tokens_map.json").get("bos_token")
    )
    if adds_bos is True and bos in ids:
        content["post_processor"] = gguf_tokenizer.bos_json(str(bos), ids[bos])
    elif adds_bos is not True:
        content["post_processor"] = None
    return content


def _read_vocab_and_merges(
    path: Path, config: Mapping[str, Any], model_type: object
) -> dict[str, Any]:
    default = "Qwen2Tokenizer" if model_type in _QWEN_TYPES else "GPT2Tokenizer"
    name = str(config.get("tokenizer_class") or default).removesuffix("Fast")
    if name not in _CLASSES:
        raise TokenizerError(
            f"{path / VOCAB}: not supported: a tokenizer of the class {name[:100]!r}",
            f"use one of {', '.join(_CLASSES)}, or a model with tokenizer.json",
        )
    content = files.read(path / MERGES, limit=_LIMIT)
    reject_lfs_pointer(path / MERGES, content)
    lines = content.decode("utf-8", errors="replace").split("\n")
    lines = [line.rstrip("\r") for line in lines[lines[0].startswith("#version") :]]
    pre_tokenizer = PRE_TOKENIZERS[_CLASSES[name]]
    splits = pre_tokenizer_json(pre_tokenizer)
    splits["pretokenizers"][-1]["add_prefix_space"] = config.get("add_prefix_space") is True
    model = gguf_tokenizer.model_json(read_json_object(path / VOCAB, limit=_LIMIT))
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if pre_tokenizer.nfc else None,
        "pre_tokenizer": splits,
        "decoder": byte_level_json(use_regex=True),
        "post_processor": None,
        "model": model | {"merges": [line.split(" ") for line in lines if line]},
    }


def _added_tokens(
    path: Path, config: Mapping[str, Any], vocab: Mapping[str, int], known: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the tokens that are matched verbatim, by their ids: those `known`, those that
    tokenizer_config.json and added_tokens.json list, and special ones of the vocabulary."""
    special = _read_json(path / "special_tokens_map.json") | dict(config)
    named = [special.get(key) for key in SPECIAL_TOKENS]
    for key in _MORE_SPECIAL:
        more = special.get(key)
        named += more if isinstance(more, list) else ()
    specials = {text: token for token in named if (text := token_text(token)) is not None}
    specials.setdefault("<|endoftext|>", "<|endoftext|>")
    listed: list[tuple[object, object]] = [
        (i, content) for content, i in _read_json(path / "added_tokens.json").items()
    ]
    listed += [(vocab[text], token) for text, token in specials.items() if text in vocab]
    decoder = config.get("added_tokens_decoder")
    listed += decoder.items() if isinstance(decoder, dict) else ()
    added = {token["id"]: token for token in known}
    for i, token in listed:
        text = token_text(token)
        if text is None or not str(i).isdecimal() or len(str(i)) > 9:
            raise ModelError(f"{path} has an invalid added token {str(i)[:50]!r}", _DAMAGED)
        flags = token if isinstance(token, dict) else {}
        is_special = flags.get("special", text in specials) is True
        added[int(str(i))] = {
            "id": int(str(i)),
            "content": text,
            **dict.fromkeys(_FLAGS, False),
            "normalized": not is_special,
            **{flag: flags[flag] for flag in _FLAGS if isinstance(flags.get(flag), bool)},
            "special": is_special,
        }
    return [added[i] for i in sorted(added)]


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, limit=_LIMIT) if path.exists() else {}


def _read_sentencepiece(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json without added tokens but those of the pieces."""
    data = files.read(path, limit=_LIMIT)
    reject_lfs_pointer(path, data)
    try:
        message = list(_fields(data))
        pieces = [dict(_fields(value)) for number, value in message if number == 1]
        trainer, normalizer = (
            dict(_fields(next((value for number, value in message if number == n), b"")))
            for n in (2, 3)
        )
        names = [piece[1].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
        types = [int(piece.get(3, 1)) for piece in pieces]
        kind = trainer.get(3, 1)
        name = normalizer.get(1, b"").decode()
        ids = {
            key: index(trainer.get(number, default))
            for key, number, default in (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2))
        }
    except (ValueError, TypeError, LookupError, AttributeError, struct.error):
        pieces = []
    if not pieces:
        raise ModelError(f"{path} is not a model of sentencepiece", _DAMAGED)
    if kind != _BPE:
        raise TokenizerError(
            f"{path}: not supported: a model of {_KINDS.get(kind, 'another kind')} (expected BPE)",
            "use a model with a BPE tokenizer; Unigram is the tokenizer of T5, XLNet and others",
        )
    changes = ["the normalizer " + name] if normalizer.get(2) else []
    changes += ["the removal of extra spaces"] if normalizer.get(4, 1) else []
    changes += ["spaces after words"] if trainer.get(24, 0) else []
    if changes:
        raise TokenizerError(
            f"{path}: not supported: {changes[0][:100]}", "use a model with another tokenizer"
        )
    fields: dict[str, Any] = {"model": "llama", "tokens": names, "scores": scores}
    fields |= {"token_type": types, "add_space_prefix": bool(normalizer.get(3, 1))}
    fields |= {f"{key}_token_id": i if i < len(names) else -1 for key, i in ids.items()}
    content, _ = gguf_tokenizer.to_json(
        {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    )
    if normalizer.get(3, 1) and (config.get("legacy") is False or _USER_DEFINED in types):
        # The space is put only before the text, not after each token that is matched verbatim.
        scheme = {"replacement": SPACE, "prepend_scheme": "first", "split": False}
        content["normalizer"], content["pre_tokenizer"] = None, {"type": "Metaspace", **scheme}
    return content


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a message of Protocol Buffers: an integer, or bytes.

    Raises ValueError and IndexError for other content.
    """
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    while position < len(data):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
                continue
            case 1 | 5 as kind:
                n = 8 if kind == 1 else 4
            case 2:
                n = varint()
            case _:
                raise ValueError("an unknown kind of field")
        if position + n > len(data):
            raise ValueError("a field past the end")
        yield key >> 3, data[position : position + n]
        position += n
