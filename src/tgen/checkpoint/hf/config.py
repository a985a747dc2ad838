"""The families' config.json, both ways: transformers' keys, version 4.57 and 5, <-> ModelConfig."""

from collections.abc import Mapping
from typing import Any

from tgen.config import FAMILIES, ModelConfig, RopeScaling
from tgen.errors import ModelError, UsageError

MODEL_TYPES = {
    "classic": "openai-gpt",
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
_FAMILY_OF = {model_type: family for family, model_type in MODEL_TYPES.items()}
_CLASSES = {
    "classic": "OpenAIGPTLMHeadModel",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ACTIVATIONS = {"relu": "relu", "gelu_tanh": "gelu_new", "gelu": "gelu", "swiglu": "silu"}


# The same thing in older and newer families; transformers takes either word in both.
_WIDTH, _HEADS = ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")
_LAYERS = ("num_hidden_layers", "n_layer")
_POSITIONS = ("max_position_embeddings", "n_positions")


def to_json(
    config: ModelConfig,
    *,
    begin: int | None,
    end: int | None,
    pad: int | None,
) -> dict[str, Any]:
    """config.json for transformers 4.57 and 5; `begin`, `end` and `pad` are tokens."""
    family = config.family
    common: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": MODEL_TYPES[family],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "float32",
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    if family in ("classic", "gpt2"):
        common |= {
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
        if family == "gpt2":
            inner = None if config.d_ff == 4 * config.d_model else config.d_ff
            return common | {
                "activation_function": activation,
                "n_inner": inner,
                "scale_attn_weights": True,
            }
        # transformers takes the table as learned; tgen must know that it is not.
        return common | {
            "afn": "gelu" if activation == "gelu_new" else activation,
            "tgen": {"position": config.position},
        }
    return common | _modern(config)


def _modern(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling := config.rope_scaling:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context_length,
            }
    extras: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": config.attention_bias, "mlp_bias": config.feed_forward_bias},
        "mistral": {"sliding_window": config.sliding_window},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"attention_bias": config.attention_bias, "use_sliding_window": False},
    }
    return extras[config.family] | {
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
    """The model that a config.json describes; raises ModelError for what tgen cannot run."""
    model_type = json.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILY_OF:
        raise ModelError(
            f"model type {model_type!r} is unknown", f"tgen reads {', '.join(sorted(_FAMILY_OF))}"
        )
    if quantized := json.get("quantization_config"):
        kind = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ModelError(
            f"the weights are quantised ({kind})",
            "fetch the model before it was quantised, or its GGUF file",
        )
    family = _FAMILY_OF[model_type]
    read = _read_old if family in ("classic", "gpt2") else _read_modern
    try:
        return ModelConfig(**FAMILIES[family] | {"family": family} | read(family, json))
    except UsageError as error:
        raise ModelError(f"config.json: {error.message}", error.hint) from None
    except (KeyError, TypeError, ValueError) as error:
        what = (
            f"lacks {error}"
            if isinstance(error, KeyError)
            else f"has a value of the wrong kind ({error})"
        )
        raise ModelError(
            f"config.json of type {model_type} {what}",
            "the file is damaged or of an unknown version",
        ) from None


def _read_old(family: str, json: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(json, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    d_model, n_heads = _integer(json, *_WIDTH), _integer(json, *_HEADS)
    activation = (
        json.get("activation_function", "gelu_new") if family == "gpt2" else json.get("afn", "gelu")
    )
    if family == "classic" and activation == "gelu":
        activation = "gelu_new"  # openai-gpt's "gelu" is the tanh form
    known = {theirs: ours for ours, theirs in _ACTIVATIONS.items() if ours != "swiglu"}
    if activation not in known:
        raise ModelError(f"activation {activation!r} is unknown", f"tgen has {', '.join(known)}")
    position = "learned"
    if family == "classic" and isinstance(json.get("tgen"), dict):
        position = json["tgen"].get("position", "learned")
    return {
        "vocab_size": _integer(json, "vocab_size"),
        "context_length": _integer(json, *_POSITIONS),
        "n_layers": _integer(json, *_LAYERS),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "head_dim": d_model // max(n_heads, 1),
        "d_ff": 4 * d_model if json.get("n_inner") is None else _integer(json, "n_inner"),
        "activation": known[activation],
        "position": position,
        "tied_embeddings": bool(json.get("tie_word_embeddings", True)),
        "norm_eps": float(json.get("layer_norm_epsilon", 1e-5)),
    }


def _read_modern(family: str, json: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(json, hidden_act="silu", use_sliding_window=False, partial_rotary_factor=1.0)
    d_model, n_heads = _integer(json, *_WIDTH), _integer(json, *_HEADS)
    rope = _rope(json)
    _refuse(rope, partial_rotary_factor=1.0)
    head_dim = json.get("head_dim") or (128 if family == "qwen3" else d_model // n_heads)
    found = _biases(family, json)
    if family == "mistral":  # a key that is not there has the default that it had at first
        window = json.get("sliding_window", 4096)
        found["sliding_window"] = window and _integer({"sliding_window": window}, "sliding_window")
    else:
        kinds = json.get("layer_types") or []
        if any(kind != "full_attention" for kind in kinds):
            raise ModelError(
                f"config.json has layer_types {sorted(set(map(str, kinds)))}",
                f"tgen runs only full_attention in {family}",
            )
    return found | {
        "vocab_size": _integer(json, "vocab_size"),
        "d_model": d_model,
        "n_heads": n_heads,
        "context_length": _integer(json, *_POSITIONS),
        "n_layers": _integer(json, *_LAYERS),
        "d_ff": _integer(json, "intermediate_size"),
        "n_kv_heads": _integer(json, "num_key_value_heads", default=n_heads),
        "head_dim": _integer({"head_dim": head_dim}, "head_dim"),
        "tied_embeddings": bool(json.get("tie_word_embeddings", False)),
        "norm_eps": float(json.get("rms_norm_eps", 1e-6)),
        "rope_theta": _theta(rope, json),
        "rope_scaling": _scaling(rope),
    }


def _rope(json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Version 5's rope_parameters, else version 4's two keys; both must mean the same."""
    older, newer = json.get("rope_scaling") or {}, json.get("rope_parameters") or {}
    if not isinstance(older, dict) or not isinstance(newer, dict):
        raise ModelError("config.json's rope parameters are no object", "the file is damaged")
    if not newer:
        return older
    theta = json.get("rope_theta", newer.get("rope_theta"))
    if newer.get("rope_theta", theta) != theta or (older and _scaling(older) != _scaling(newer)):
        raise ModelError(
            "config.json's rope_parameters and its rope_theta or rope_scaling disagree",
            "leave rope_parameters alone there, or the other two",
        )
    return newer


def _theta(rope: Mapping[str, Any], json: Mapping[str, Any]) -> float:
    value = rope.get("rope_theta", json.get("rope_theta", 10_000.0))
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ModelError(f"config.json has rope_theta={value!r}", "rope_theta must be a number")
    return float(value)


def _biases(family: str, json: Mapping[str, Any]) -> dict[str, Any]:
    """What llama and qwen3 leave open; in the others it is fixed, whatever their config says."""
    if family in ("mistral", "qwen2"):
        return {}
    bias = bool(json.get("attention_bias", False))
    feed = bool(json.get("mlp_bias", False)) if family == "llama" else False
    return {"attention_bias": bias, "output_bias": bias, "feed_forward_bias": feed}


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_context_length=_integer(rope, "original_max_position_embeddings"),
        )
    raise ModelError(f"rope type {kind!r} is unknown", "tgen has default, linear and llama3")


def _refuse(json: Mapping[str, Any], **only: object) -> None:
    """Raises ModelError where a setting has a value other than the one that tgen implements."""
    for key, value in only.items():
        if json.get(key, value) not in (value, None):
            raise ModelError(
                f"config.json has {key}={json[key]!r}", f"tgen runs only {key}={value!r}"
            )


def _integer(json: Mapping[str, Any], *spellings: str, default: int | None = None) -> int:
    key = next((name for name in spellings if name in json), spellings[0])
    value = json[key] if default is None else json.get(key) or default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ModelError(
            f"config.json has {key}={value!r}", f"{key} must be a positive whole number"
        )
    return value
