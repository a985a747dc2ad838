"""config.json, both ways: transformers' keys, versions 4.57 and 5, <-> ModelConfig."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tgen.checkpoint.git_lfs import reject_lfs_pointer
from tgen.checkpoint.hf.attention_config import (
    layer_types_json,
    read_layer_types,
    read_rope,
    rope_json,
)
from tgen.checkpoint.hf.config_values import ConfigValues, require_layers, require_values
from tgen.checkpoint.hf.families import (
    COMMON_DEFAULTS,
    FAMILY_LAYOUTS,
    UNSUPPORTED,
    FamilyLayout,
)
from tgen.config import FAMILIES, GATED, SCALED_EMBEDDINGS, ModelConfig
from tgen.errors import ModelError, TgenError, UsageError
from tgen.storage import files

_FAMILY_BY_MODEL_TYPE = {layout.model_type: name for name, layout in FAMILY_LAYOUTS.items()}
_KNOWN = f"use one of {', '.join(sorted(_FAMILY_BY_MODEL_TYPE))}"
# transformers' names of each activation, the one to write first; gated ones have names of their own
_ACTIVATIONS = {
    "relu": ("relu",),
    "relu2": ("relu2",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "gelu": ("gelu",),
    "swiglu": ("silu", "swish"),
    "geglu": ("gelu_pytorch_tanh", "gelu_new"),
}
# Models with images whose language model is one of the families: its type, and the values that
# config.json omits where they are the defaults of transformers.
_TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    ),
    "mistral3": ("mistral", {}),
}
_OF_THE_WHOLE = (  # keys beside text_config that count for the language model
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("dtype", "torch_dtype", "quantization_config"),
)
_DAMAGED = "download the file again: it is damaged"
_FIELD_TYPES = {field.name: field.type for field in fields(ModelConfig)}
_QUERY_SCALAR = "query_pre_attn_scalar"  # Gemma's: the attention scale is its -1/2 power


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


def text_part(json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the language model in a supported model with images; that of other
    models as it is."""
    kind, inner = json.get("model_type"), json.get("text_config")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS or not isinstance(inner, dict):
        return json
    model_type, defaults = _TEXT_PARTS[kind]
    whole = {key: json[key] for key in _OF_THE_WHOLE if json.get(key) is not None}
    part = {"model_type": model_type} | defaults | inner | whole
    family = _FAMILY_BY_MODEL_TYPE.get(str(part["model_type"]))
    return part | ({"architectures": [FAMILY_LAYOUTS[family].model_class]} if family else {})


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
    own = {key: getattr(config, field) for key, field in layout.keys.items()}
    activation = _ACTIVATIONS[config.activation][0]
    if config.family == "classic":
        # transformers loads the sinusoid as learned positions; tgen must know that it is computed.
        own["tgen"] = {"position": config.position}
        activation = "gelu" if activation == "gelu_new" else activation  # which is the tanh form
    if "n_inner" in own:
        own["n_inner"] = None if config.d_ff == 4 * config.d_model else config.d_ff
    if config.family == "granite":
        own["attention_multiplier"] = config.score_scale
    if layout.parallel:
        own["use_parallel_residual"] = config.norm_placement == layout.parallel
    if config.family in ("cohere", "cohere2"):
        own["logit_scale"] = 1 / config.logits_divisor
    if config.family == "gptj":
        own["rotary_dim"] = config.n_rotated
    if config.family == "opt":
        own["word_embed_proj_dim"] = config.d_model
    if config.family == "gpt_bigcode":
        own["multi_query"] = config.n_kv_heads == 1
    if config.family == "gemma3":
        scalar = round(config.score_scale**-2, 6)  # version 5 wants an integer
        own[_QUERY_SCALAR] = int(scalar) if scalar.is_integer() else scalar
    rope = rope_json(config) if config.position == "rotary" and config.family != "gptj" else {}
    activations = {layout.activation_key: activation}
    return {**common, **own, **activations, **layer_types_json(config), **layout.constants, **rope}


def from_json(json: Mapping[str, Any]) -> ModelConfig:
    """Return the model that config.json describes; raises ModelError for unsupported models."""
    json = text_part(json)
    model_type = json.get("model_type")
    if isinstance(model_type, str) and (reason := UNSUPPORTED.get(model_type)):
        raise ModelError(f"unsupported model type {model_type!r}: {reason}", _KNOWN)
    if not isinstance(model_type, str) or model_type not in _FAMILY_BY_MODEL_TYPE:
        raise ModelError(f"unknown model type {model_type!r}"[:200], _other_model_hint(json))
    if quantized := json.get("quantization_config") or json.get("quantization"):
        kind = quantized.get("quant_method", "mlx") if isinstance(quantized, dict) else quantized
        raise ModelError(
            f"the weights are quantized ({str(kind)[:100]})",
            "download the unquantized model, or its GGUF file",
        )
    family = _FAMILY_BY_MODEL_TYPE[model_type]
    try:
        return ModelConfig(**FAMILIES[family] | _read(family, json), family=family)
    except UsageError as error:
        message, hint = (_in_keys(family, text) for text in (error.message, error.hint))
        layout = FAMILY_LAYOUTS[family]
        key = next((key for key, field in layout.keys.items() if field == error.field), "")
        omitted = key in layout.defaults and key not in ConfigValues(json, {})
        by = f"; this is the default of {model_type}" if omitted else ""
        raise ModelError(f"config.json: {message}{by}", hint) from None
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = (
            f"lacks {error}" if isinstance(error, KeyError) else f"has an invalid value: {error}"
        )
        raise ModelError(
            f"config.json of type {model_type} {reason}",
            "download the file again: it is damaged or of an unknown version",
        ) from None


def _in_keys(family: str, text: str) -> str:
    """Replace the fields of ModelConfig in a message by the family's keys."""
    keys = {field: key for key, field in FAMILY_LAYOUTS[family].keys.items()}
    return re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), text)


def _other_model_hint(json: Mapping[str, Any]) -> str:
    if any(key.endswith("_experts") and json[key] for key in json):  # num_, num_local_, n_routed_
        return f"this is a mixture of experts; {_KNOWN}"
    if isinstance(text := json.get("text_config"), dict):
        inner = text.get("model_type")
        if isinstance(inner, str) and inner in _FAMILY_BY_MODEL_TYPE:
            return f"this is a model with images; save its text part alone, of type {inner}"
        return f"this is a model with images; {_KNOWN}"
    return _KNOWN


def _read(family: str, json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelConfig that differ from the family's defaults."""
    layout = FAMILY_LAYOUTS[family]
    require_values(json, layout.required)
    values = ConfigValues(json, {**COMMON_DEFAULTS, **layout.defaults})
    d_model = values.integer("hidden_size")
    n_heads = values.integer("num_attention_heads")
    # What null means, and what families without the key have.
    sizes: dict[str, int] = {
        "n_kv_heads": n_heads,
        "head_dim": max(1, d_model // n_heads),
        "d_ff": 4 * d_model,
    }
    read: dict[str, Any] = dict(sizes)
    for key, field in layout.keys.items():
        match _FIELD_TYPES[field]:
            case type() as kind if kind is bool:
                read[field] = values.boolean(key)
            case type() as kind if kind is int:
                read[field] = values.integer(key, null=sizes.get(field))
            case _:
                read[field] = values.number(key)
    require_layers(read["n_layers"])
    if "attention_bias" in read and layout.output_bias:
        read["output_bias"] = read["attention_bias"]
    if family == "classic":
        own = json.get("tgen")
        read["position"] = own.get("position", "learned") if isinstance(own, dict) else "learned"
    if layout.parallel:
        parallel = values.boolean("use_parallel_residual")
        read["norm_placement"] = layout.parallel if parallel else "pre"
    if family in ("cohere", "cohere2"):
        read["logits_divisor"] = 1 / values.positive("logit_scale")
    if family == "gpt_bigcode" and values.boolean("multi_query"):
        read["n_kv_heads"] = 1
    if family == "opt":
        require_values(json, {"word_embed_proj_dim": d_model})
    if family == "gptj" and (n := values.integer("rotary_dim")) != read["head_dim"]:
        read["rotary_dim"] = n
    if family == "gemma3":
        read["attention_scale"] = values.positive(_QUERY_SCALAR) ** -0.5
    if family in SCALED_EMBEDDINGS:
        read["embedding_scale"] = d_model**0.5
    if FAMILIES[family]["position"] == "rotary":
        read |= read_rope(family, values, head_dim=read["head_dim"])
    read |= read_layer_types(family, values, n_layers=read["n_layers"])
    return read | {"activation": _read_activation(family, layout, values)}


def _read_activation(family: str, layout: FamilyLayout, values: ConfigValues) -> str:
    name = values.get(layout.activation_key)
    implied = FAMILIES[family]["activation"]
    allowed = {implied} if implied in GATED else _ACTIVATIONS.keys() - GATED
    known = {theirs: ours for ours in allowed for theirs in _ACTIVATIONS[ours]}
    if family in ("classic", "gemma"):
        known["gelu"] = implied if family == "gemma" else "gelu_tanh"  # theirs is the tanh form
    if not isinstance(name, str) or name not in known:
        raise ModelError(
            f"config.json: unknown activation {name!r}"[:200],
            f"use one of {', '.join(sorted(known))}",
        )
    return known[name]
