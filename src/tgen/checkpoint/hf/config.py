"""config.json, both ways: transformers' keys, versions 4.57 and 5, <-> ModelConfig."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgen.checkpoint.hf.families import FAMILY_LAYOUTS
from tgen.checkpoint.safetensors_file import reject_lfs_pointer
from tgen.config import FAMILIES, ModelConfig, RopeScaling
from tgen.errors import ModelError, TgenError, UsageError
from tgen.storage import files

_FAMILY_BY_MODEL_TYPE = {layout.model_type: name for name, layout in FAMILY_LAYOUTS.items()}
_ACTIVATIONS = {"relu": "relu", "gelu_tanh": "gelu_new", "gelu": "gelu", "swiglu": "silu"}
_DAMAGED = "download the file again: it is damaged"
# Field -> its key in newer and in GPT-style families; transformers takes either key in both.
_SIZES = {
    "d_model": ("hidden_size", "n_embd"),
    "n_layers": ("num_hidden_layers", "n_layer"),
    "n_heads": ("num_attention_heads", "n_head"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
}


def read_json_object(path: Path, *, limit: int = 64 << 20) -> dict[str, Any]:
    """Return the object in a JSON file of at most `limit` bytes; raises ModelError."""
    try:
        content = files.read(path, limit=limit)
        reject_lfs_pointer(path, content)
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON", _DAMAGED) from None
    except TgenError as error:
        raise ModelError(error.message, error.hint) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object", _DAMAGED)
    return value


def to_json(
    config: ModelConfig, *, begin: int | None, end: int | list[int] | None, pad: int | None
) -> dict[str, Any]:
    """Return config.json for transformers 4.57 and 5; `begin`, `end` and `pad` are token ids."""
    layout = FAMILY_LAYOUTS[config.family]
    common: dict[str, Any] = {
        "architectures": [layout.model_class],
        "model_type": layout.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "float32",
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    return common | (_gpt_json(config) if layout.gpt_style else _llama_json(config))


def _gpt_json(config: ModelConfig) -> dict[str, Any]:
    sizes = {
        "n_positions": config.context_length,
        "n_ctx": config.context_length,
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": config.norm_eps,
    }
    activation = _ACTIVATIONS[config.activation]
    if config.family == "gpt2":
        return sizes | {
            "activation_function": activation,
            "n_inner": None if config.d_ff == 4 * config.d_model else config.d_ff,
            "scale_attn_weights": True,
        }
    # transformers loads the sinusoid as learned positions; tgen must know that it is computed.
    return sizes | {
        "afn": "gelu" if activation == "gelu_new" else activation,
        "tgen": {"position": config.position},
    }


def _llama_json(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling := config.rope_scaling:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context_length,
            }
    layout = FAMILY_LAYOUTS[config.family]
    own = {key: getattr(config, field) for key, field in layout.keys.items()}
    return {
        **own,
        **layout.constants,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
        # Version 4 reads the first two keys, version 5 the third; one alone is wrong on the other.
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaling else None,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
    }


def from_json(json: Mapping[str, Any]) -> ModelConfig:
    """Return the model that config.json describes; raises ModelError for unsupported models."""
    model_type = json.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILY_BY_MODEL_TYPE:
        raise ModelError(
            f"unknown model type {model_type!r}"[:200],
            f"use one of {', '.join(sorted(_FAMILY_BY_MODEL_TYPE))}",
        )
    if quantized := json.get("quantization_config"):
        kind = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ModelError(
            f"the weights are quantized ({str(kind)[:100]})",
            "download the unquantized model, or its GGUF file",
        )
    family = _FAMILY_BY_MODEL_TYPE[model_type]
    read = _read_gpt if FAMILY_LAYOUTS[family].gpt_style else _read_llama
    try:
        sizes = {field: _integer(json, *keys) for field, keys in _SIZES.items()}
        own = read(family, json, sizes["d_model"], sizes["n_heads"])
        return ModelConfig(**FAMILIES[family] | sizes | own, family=family)
    except UsageError as error:
        raise ModelError(f"config.json: {error.message}", error.hint) from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = (
            f"lacks {error}" if isinstance(error, KeyError) else f"has an invalid value: {error}"
        )
        raise ModelError(
            f"config.json of type {model_type} {reason}",
            "download the file again: it is damaged or of an unknown version",
        ) from None


def _read_gpt(family: str, json: Mapping[str, Any], d_model: int, n_heads: int) -> dict[str, Any]:
    _require_values(json, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    position = "learned"
    if family == "gpt2":
        activation = json.get("activation_function", "gelu_new")
    else:
        activation = json.get("afn", "gelu")
        activation = "gelu_new" if activation == "gelu" else activation  # openai-gpt's is tanh
        if isinstance(json.get("tgen"), dict):
            position = json["tgen"].get("position", position)
    known = {theirs: ours for ours, theirs in _ACTIVATIONS.items() if ours != "swiglu"}
    if not isinstance(activation, str) or activation not in known:
        raise ModelError(
            f"config.json: unknown activation {activation!r}"[:200],
            f"use one of {', '.join(known)}",
        )
    return {
        "n_kv_heads": n_heads,
        "head_dim": d_model // n_heads,
        "d_ff": 4 * d_model if json.get("n_inner") is None else _integer(json, "n_inner"),
        "activation": known[activation],
        "position": position,
        "tied_embeddings": _boolean(json, "tie_word_embeddings", default=True),
        "norm_eps": _number(json, "layer_norm_epsilon", default=1e-5),
    }


def _read_llama(family: str, json: Mapping[str, Any], d_model: int, n_heads: int) -> dict[str, Any]:
    layout = FAMILY_LAYOUTS[family]
    _require_values(json, hidden_act="silu", use_sliding_window=False, partial_rotary_factor=1.0)
    rope = _rope(json)
    _require_values(rope, partial_rotary_factor=1.0)
    head_dim = json.get("head_dim") or layout.defaults.get("head_dim", d_model // n_heads)
    values: dict[str, Any] = {}
    for key, field in layout.keys.items():
        if field == "sliding_window":
            value = json.get(key, layout.defaults.get(key))
            values[field] = None if value is None else _integer({key: value}, key)
        else:
            values[field] = _boolean(json, key, default=False)
    if "attention_bias" in values:
        values["output_bias"] = values["attention_bias"]
    layer_types = json.get("layer_types") or []
    if "sliding_window" not in values and any(t != "full_attention" for t in layer_types):
        raise ModelError(
            f"config.json has layer_types {sorted(set(map(str, layer_types)))}",
            f"use a {family} model with full_attention only",
        )
    return values | {
        "d_ff": _integer(json, "intermediate_size"),
        "n_kv_heads": _integer(json, "num_key_value_heads", default=n_heads),
        "head_dim": _integer({"head_dim": head_dim}, "head_dim"),
        "tied_embeddings": _boolean(json, "tie_word_embeddings", default=False),
        "norm_eps": _number(json, "rms_norm_eps", default=1e-6),
        "rope_theta": _rope_theta(rope, json),
        "rope_scaling": _rope_scaling(rope),
    }


def _rope(json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return version 5's rope_parameters, else version 4's rope_scaling; both must agree."""
    older, newer = json.get("rope_scaling") or {}, json.get("rope_parameters") or {}
    if not isinstance(older, dict) or not isinstance(newer, dict):
        raise ModelError("config.json: the rope parameters are not an object", _DAMAGED)
    if not newer:
        return older
    theta = json.get("rope_theta", newer.get("rope_theta"))
    same_scaling = not older or _rope_scaling(older) == _rope_scaling(newer)
    if newer.get("rope_theta", theta) != theta or not same_scaling:
        raise ModelError(
            "config.json: rope_parameters disagrees with rope_theta or rope_scaling",
            "remove rope_parameters, or the other two keys",
        )
    return newer


def _rope_theta(rope: Mapping[str, Any], json: Mapping[str, Any]) -> float:
    return _number(rope if "rope_theta" in rope else json, "rope_theta", default=10_000.0)


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_number(rope, "factor"))
    if kind == "llama3":
        return RopeScaling(
            factor=_number(rope, "factor"),
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_context_length=_integer(rope, "original_max_position_embeddings"),
        )
    raise ModelError(
        f"config.json: unknown RoPE type {kind!r}"[:200], "use default, linear or llama3"
    )


def _require_values(json: Mapping[str, Any], **supported: object) -> None:
    """Raise ModelError if a key has another value than the only one that tgen implements."""
    for key, value in supported.items():
        if json.get(key, value) not in (value, None):
            raise ModelError(
                f"config.json has {key}={json[key]!r}"[:200], f"use a model with {key}={value!r}"
            )


def _boolean(json: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = json.get(key)
    if not isinstance(value, bool | None):
        raise ModelError(f"config.json has {key}={value!r}"[:200], f"set {key} to true or false")
    return default if value is None else value


def _number(json: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    value = json[key] if default is None else json.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise ModelError(f"config.json has {key}={value!r}"[:200], f"set {key} to a number")
    return float(value)


def _integer(json: Mapping[str, Any], *spellings: str, default: int | None = None) -> int:
    key = next((name for name in spellings if name in json), spellings[0])
    value = json[key] if default is None else json.get(key) or default
    return require_positive_integer(value, key, "config.json has")


def require_positive_integer(value: object, key: str, prefix: str) -> int:
    """Return a size from a file; raises ModelError unless it is from 1 to 2^31 - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ModelError(f"{prefix} {key}={value!r}"[:200], f"set {key} to a positive integer")
    return value
