"""Reading a model from one GGUF file: its shape, tokenizer and weights."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tgen.checkpoint import safetensors_file
from tgen.checkpoint.dtypes import Array, to_float32
from tgen.checkpoint.gguf import header as gguf_file
from tgen.checkpoint.gguf import rope_scaling, tensor_names
from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.checkpoint.gguf.header import Header
from tgen.config import FAMILIES, ModelConfig, RopeScaling
from tgen.errors import ModelError, TgenError, UsageError
from tgen.tokenizer import Tokenizer

_FAMILIES = sorted(set(tensor_names.ARCHITECTURES.values()))  # each has a family of its name
_FOREIGN = "tgen does not run such models"
_SPLIT = "join the parts with llama.cpp's `llama-gguf-split --merge`"


def load(path: Path) -> tuple[ModelConfig, Tokenizer, dict[str, Array], list[int]]:
    """Config, tokenizer, arrays by our names, and the tokens that end a text.

    Raises ModelError, TokenizerError, or UsageError where the package gguf is needed and missing.
    """
    header = gguf_file.read_header(path)
    try:
        config = read_config(path, header)
        shapes = {name: entry.shape for name, entry in header.tensors.items()}
        tensor_names.check(config, shapes)
        text, ends = gguf_tokenizer.to_json(header.fields)
        tokenizer = Tokenizer(text, ends=ends)
    except UsageError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from None
    except TgenError as error:
        raise type(error)(f"{path}: {error.message}", error.hint) from None
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path} has {tokenizer.vocab_size} tokens, its weights {config.vocab_size}",
            "the file is damaged",
        )
    wanted = {n: e for n, e in header.tensors.items() if n != tensor_names.ROPE_FREQS}
    arrays = gguf_file.read_tensors(path, wanted)
    safetensors_file.check_finite(path, arrays)
    return config, tokenizer, tensor_names.from_layout(config, arrays), ends


def chat_template(path: Path) -> tuple[str | None, dict[str, str]]:
    """The template for conversations, if the file has one, and the texts of the tokens that it may
    name: bos_token, eos_token, unk_token, pad_token."""
    fields = gguf_file.read_header(path).fields
    source, tokens = fields.get("tokenizer.chat_template"), fields.get("tokenizer.ggml.tokens")
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        i = fields.get(f"tokenizer.ggml.{key}_token_id")
        if type(i) is int and isinstance(tokens, list) and 0 <= i < len(tokens):
            named[f"{name}_token"] = str(tokens[i])
    return source if isinstance(source, str) else None, named


def read_config(path: Path, header: Header) -> ModelConfig:
    """The model's shape. Raises ModelError for what tgen cannot run, UsageError for odd values."""
    fields, entries = header
    architecture = fields.get("general.architecture")
    if architecture not in _FAMILIES:
        raise ModelError(
            f"GGUF architecture {architecture!r} is unknown"[:200],
            f"tgen reads {', '.join(_FAMILIES)}",
        )
    family = str(architecture)
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in fields.items()
        if key.startswith(f"{architecture}.")
    }
    if fields.get("split.count", 0) not in (0, 1):
        raise ModelError("it is one part of several", _SPLIT)
    if own.get("expert_count", 0) != 0:
        raise ModelError(f"it has {own['expert_count']!r} experts"[:200], _FOREIGN)
    d_model, n_heads = _integer(own, "embedding_length"), _integer(own, "attention.head_count")
    head_dim = _integer(own, "attention.key_length", d_model // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ModelError(f"its heads are of {head_dim}, {key}={own[key]!r}"[:200], _FOREIGN)
    values: dict[str, Any] = {
        "vocab_size": _rows(entries, "token_embd.weight"),
        "context_length": _integer(own, "context_length"),
        "n_layers": _integer(own, "block_count"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": _integer(own, "attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_ff": _integer(own, "feed_forward_length"),
        "tied_embeddings": "output.weight" not in entries,
    }
    # llama.cpp takes a mistral for a llama and does not heed the window: only we do
    if architecture == "llama" and "attention.sliding_window" in own:
        family = "mistral"
        values["sliding_window"] = _integer(own, "attention.sliding_window")
    implied = FAMILIES[family]
    if implied["position"] == "rotary":
        values["norm_eps"] = _number(own, "attention.layer_norm_rms_epsilon", 1e-6)
        values["rope_theta"] = _number(own, "rope.freq_base", 10_000.0)
        values["rope_scaling"] = _stretching(path, header, own, values["rope_theta"], head_dim)
    else:
        values["norm_eps"] = _number(own, "attention.layer_norm_epsilon", 1e-5)
    if family == "llama":  # biases are there or not
        values["attention_bias"] = "blk.0.attn_q.bias" in entries
        values["output_bias"] = "blk.0.attn_output.bias" in entries
        values["feed_forward_bias"] = "blk.0.ffn_up.bias" in entries
    return ModelConfig(**implied | values, family=family)


def _stretching(
    path: Path, header: Header, own: Mapping[str, Any], theta: float, head_dim: int
) -> RopeScaling | None:
    kind = own.get("rope.scaling.type", "linear")
    key = "rope.scaling.factor" if "rope.scaling.factor" in own else "rope.scale_linear"  # of old
    stretched = own.get(key, 0) not in (0, 1)
    entry = header.tensors.get(tensor_names.ROPE_FREQS)
    if kind not in ("none", "linear") or (entry and stretched):
        raise ModelError(f"its rotary frequencies are scaled by {kind!r}"[:200], rope_scaling.ONLY)
    if entry is None:
        if kind == "none" or not stretched:
            return None
        return RopeScaling(kind="linear", factor=_number(own, key, 1.0))
    if entry.shape != (head_dim // 2,):
        raise ModelError(
            f"{tensor_names.ROPE_FREQS} has shape {list(entry.shape)}, not {[head_dim // 2]}",
            "the file is damaged",
        )
    found = gguf_file.read_tensors(path, {tensor_names.ROPE_FREQS: entry})
    (divisors,) = found.values()
    return rope_scaling.read(theta, to_float32(divisors), header.fields)


def _rows(entries: Mapping[str, gguf_file.Entry], name: str) -> int:
    if name not in entries:
        raise ModelError(f"{name} is missing", "the file is damaged, or holds no whole model")
    return entries[name].shape[0]


def _integer(own: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = own.get(key, default)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ModelError(f"it has {key}={value!r}"[:200], f"{key} must be a positive whole number")
    return value


def _number(own: Mapping[str, Any], key: str, default: float) -> float:
    """A number that was stored as float32, as it is written in digits."""
    value = own.get(key, default)
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise ModelError(f"it has {key}={value!r}"[:200], f"{key} must be a positive number")
    return float(str(np.float32(value)))
