"""Reading a model from a GGUF file: config, tokenizer, weights and chat template."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tgen.checkpoint import safetensors_file
from tgen.checkpoint.dtypes import Array, to_float32
from tgen.checkpoint.gguf import rope_scaling, tensor_names, tokenizer
from tgen.checkpoint.gguf.header import Header, read_header, read_tensors
from tgen.checkpoint.hf.config_values import require_positive_integer
from tgen.config import FAMILIES, ModelConfig, RopeScaling
from tgen.errors import ModelError, TgenError, UsageError
from tgen.model.ram import check_ram
from tgen.tokenizer import Tokenizer

_ARCHITECTURES = sorted(set(tensor_names.ARCHITECTURES.values()))  # each is a family's name, too
_DAMAGED, _UNSUPPORTED = "download or export the file again", "use another model"


def load(path: Path) -> tuple[ModelConfig, Tokenizer, dict[str, Array], list[int], bool]:
    """Return config, tokenizer, arrays by tgen's names, end-of-text token ids, and whether the
    file's matrices are quantized.

    Raises ModelError, TokenizerError, or UsageError if the package gguf is needed but missing.
    """
    header = read_header(path)
    try:
        config = read_config(path, header)
        shapes = {name: entry.shape for name, entry in header.tensors.items()}
        tensor_names.check_shapes(config, shapes)
        text, ends = tokenizer.to_json(header.fields)
        loaded_tokenizer = Tokenizer(text, end_ids=ends)
    except UsageError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from None
    except TgenError as error:
        raise type(error)(f"{path}: {error.message}", error.hint) from None
    if loaded_tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path} has {loaded_tokenizer.vocab_size} tokens (expected {config.vocab_size})",
            _DAMAGED,
        )
    entries = {n: e for n, e in header.tensors.items() if n != tensor_names.ROPE_FREQS}
    check_ram(sum(entry.array_bytes for entry in entries.values()), f"loading {str(path)!r}")
    arrays = read_tensors(path, entries)
    safetensors_file.check_finite(path, arrays)
    quantized = any(entry.quantized for entry in entries.values())
    named = tensor_names.from_gguf_arrays(config, arrays)
    return config, loaded_tokenizer, named, ends, quantized


def chat_template(path: Path) -> tuple[str | None, dict[str, str]]:
    """Return the chat template or None, and the special tokens that it may name.

    Raises ModelError.
    """
    fields = read_header(path).fields
    source, tokens = fields.get("tokenizer.chat_template"), fields.get("tokenizer.ggml.tokens")
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        i = fields.get(f"tokenizer.ggml.{key}_token_id")
        if type(i) is int and isinstance(tokens, list) and 0 <= i < len(tokens):
            special[f"{name}_token"] = str(tokens[i])
    return source if isinstance(source, str) else None, special


def read_config(path: Path, header: Header) -> ModelConfig:
    """Return the config; raises ModelError for unsupported models, UsageError for bad values."""
    fields, entries = header
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"unknown GGUF architecture {architecture!r}"[:200],
            f"use one of {', '.join(_ARCHITECTURES)}",
        )
    if fields.get("split.count", 0) not in (0, 1):
        raise ModelError(
            "it is one of several parts", "join them with `llama-gguf-split --merge` of llama.cpp"
        )
    family = str(architecture)
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): v for key, v in fields.items() if key.startswith(prefix)}
    if own.get("expert_count", 0) != 0:
        raise ModelError(f"it has {own['expert_count']!r} experts"[:200], _UNSUPPORTED)
    if "token_embd.weight" not in entries:
        raise ModelError("token_embd.weight is missing", "download the file again: it is damaged")
    d_model, n_heads = _integer(own, "embedding_length"), _integer(own, "attention.head_count")
    head_dim = _integer(own, "attention.key_length", d_model // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ModelError(
                f"its head size is {head_dim}, but {key}={own[key]!r}"[:200], _UNSUPPORTED
            )
    values: dict[str, Any] = {
        "vocab_size": entries["token_embd.weight"].shape[0],
        "context_length": _integer(own, "context_length"),
        "n_layers": _integer(own, "block_count"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": _integer(own, "attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_ff": _integer(own, "feed_forward_length"),
        "tied_embeddings": "output.weight" not in entries,
    }
    # llama.cpp runs a mistral as a llama and ignores the window
    if architecture == "llama" and "attention.sliding_window" in own:
        family = "mistral"
        values["sliding_window"] = _integer(own, "attention.sliding_window")
    implied = FAMILIES[family]
    if implied["position"] == "rotary":
        values["norm_eps"] = _number(own, "attention.layer_norm_rms_epsilon", 1e-6)
        values["rope_theta"] = _number(own, "rope.freq_base", 10_000.0)
        values["rope_scaling"] = _rope_scaling(path, header, own, values["rope_theta"], head_dim)
    else:
        values["norm_eps"] = _number(own, "attention.layer_norm_epsilon", 1e-5)
    biases = tensor_names.OPTIONAL_BIASES.get(family, {})
    values |= {field: tensor in entries for field, tensor in biases.items()}
    return ModelConfig(**implied | values, family=family)


def _rope_scaling(
    path: Path, header: Header, own: Mapping[str, Any], theta: float, head_dim: int
) -> RopeScaling | None:
    kind = own.get("rope.scaling.type", "linear")
    # the second key is the older one
    key = "rope.scaling.factor" if "rope.scaling.factor" in own else "rope.scale_linear"
    linear = own.get(key, 0) not in (0, 1)
    entry = header.tensors.get(tensor_names.ROPE_FREQS)
    if kind not in ("none", "linear") or (entry and linear):
        raise ModelError(f"unsupported RoPE scaling {kind!r}"[:200], rope_scaling.SUPPORTED)
    if entry is None:
        if kind == "none" or not linear:
            return None
        return RopeScaling(kind="linear", factor=_number(own, key, 1.0))
    if entry.shape != (head_dim // 2,):
        raise ModelError(
            f"{tensor_names.ROPE_FREQS} has shape {list(entry.shape)} (expected {[head_dim // 2]})",
            _DAMAGED,
        )
    (divisors,) = read_tensors(path, {tensor_names.ROPE_FREQS: entry}).values()
    return rope_scaling.infer_scaling(theta, to_float32(divisors), header.fields)


def _integer(own: Mapping[str, Any], key: str, default: int | None = None) -> int:
    return require_positive_integer(own.get(key, default), key, "it has")


def _number(own: Mapping[str, Any], key: str, default: float) -> float:
    """A number stored as float32, as the shortest decimal that gives this float32."""
    value = own.get(key, default)
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise ModelError(f"it has {key}={value!r}"[:200], f"set {key} to a positive number")
    return float(str(np.float32(value)))
