"""The model's config as fields of a GGUF file, both ways.

Llama 3's RoPE scaling is a tensor of frequency divisors in GGUF, from which it is inferred.
"""

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.dtypes import Floats, to_float32
from tgen.checkpoint.gguf import tensor_names
from tgen.checkpoint.gguf.architectures import (
    ARCHITECTURES,
    BIASES,
    NOPE_STEP,
    WINDOW_STEP,
    exaone_step,
    gemma_scale,
    window_pattern,
    yarn_attention_factor,
)
from tgen.checkpoint.gguf.header import Header, read_tensors
from tgen.checkpoint.hf.config_values import invalid_value, require_layers, require_positive_integer
from tgen.checkpoint.hf.families import UNSUPPORTED
from tgen.config import FAMILIES, ModelConfig, RopeScaling
from tgen.errors import ModelError
from tgen.model.rope import scale_frequencies

_PREFIX = "tgen.rope_scaling."
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")
HINT = "use a model with linear, yarn or Llama 3 RoPE scaling"
_FAMILIES = {one.name: family for family, one in reversed(ARCHITECTURES.items())}
_DAMAGED, _UNSUPPORTED = "download or export the file again", "use another model"
_ATTENTION_BIASES = {"attention_bias", "output_bias"}
_SCALES = {  # Granite's
    "embedding_scale": "embedding_scale",
    "attention.scale": "attention_scale",
    "residual_scale": "residual_scale",
    "logit_scale": "logits_divisor",
}
_GEMMA_PATTERN = 6  # every sixth layer of a gemma3 sees the whole context, unless a field differs
_PATTERN, _LOCAL_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"
# Fields that change what a model computes -> the only value that is supported.
_SUPPORTED = {
    "attention.clamp_kqv": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "rope.scaling.alpha": 0,
    "attention.causal": True,
}


def compute_divisors(theta: float, head_dim: int, scaling: RopeScaling) -> Floats:
    """Return the divisor of each rotary frequency, (D / 2,)."""
    frequencies = _frequencies(theta, head_dim)
    divisors: Floats = (frequencies / scale_frequencies(frequencies, theta, scaling)).astype(
        np.float32
    )
    return divisors


def scaling_fields(scaling: RopeScaling) -> dict[str, float]:
    """Return the parameters as GGUF fields, which llama.cpp ignores."""
    return {f"{_PREFIX}{name}": float(getattr(scaling, name)) for name in _NUMBERS}


def infer_scaling(theta: float, divisors: Floats, fields: Mapping[str, Any]) -> RopeScaling | None:
    """Return the scaling with these divisors, (D / 2,) float32; None if all are 1.

    Uses tgen's own `fields` if the file has them. Raises ModelError if no Llama 3 scaling has these
    divisors, UsageError for parameters out of range.
    """
    if (divisors == 1).all():
        return None
    match [fields.get(f"{_PREFIX}{name}") for name in _NUMBERS]:
        case [float(factor), float(low), float(high), float(length)] if abs(length) < 1 << 31:
            scaling = RopeScaling(
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=high,
                original_context_length=round(length),
            )
        case _:
            scaling = _infer_standard(theta, divisors)
    with np.errstate(all="ignore"):  # extreme parameters give values that match nothing
        expected = compute_divisors(theta, 2 * len(divisors), scaling)
    if not np.allclose(expected, divisors, rtol=1e-4, atol=0):
        raise ModelError("rope_freqs.weight is not Llama 3's RoPE scaling", HINT)
    return scaling


def _infer_standard(theta: float, divisors: Floats) -> RopeScaling:
    """Assume Llama 3's two frequency factors; the interpolated divisors give the context length."""
    factor = float(str(divisors.max()))
    between = (divisors > 1) & (divisors < divisors.max())
    if not between.any() or not 1 < factor < math.inf:
        raise ModelError("rope_freqs.weight does not determine a RoPE scaling", HINT)
    standard = RopeScaling(factor=factor)
    kept = (1 / divisors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    low, high = standard.low_freq_factor, standard.high_freq_factor
    turns = kept * (high - low) + low
    turns_per_token = _frequencies(theta, 2 * len(divisors))[between] / (2 * math.pi)
    length = float(np.median(turns / turns_per_token))
    return RopeScaling(factor=factor, original_context_length=max(1, round(min(length, 1e9))))


def _frequencies(theta: float, head_dim: int) -> NDArray[np.float64]:
    frequencies: NDArray[np.float64] = 1 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    return frequencies


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that describe the architecture; `check_supported` has passed."""
    fields: dict[str, Any] = {
        "context_length": config.context_length,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    rms = "_rms" if config.norm == "rms_norm" else ""
    fields[f"attention.layer_norm{rms}_epsilon"] = config.norm_eps
    if config.position == "rotary":
        fields["rope.freq_base"] = config.rope_theta
        fields["rope.dimension_count"] = config.n_rotated
    if config.sliding_window is not None or config.family == "phi3":
        fields["attention.sliding_window"] = config.sliding_window or 0
    match config.family:
        case "gpt_neox" | "stablelm":
            fields["use_parallel_residual"] = config.norm_placement in ("parallel", "shared")
        case "cohere" | "cohere2":
            fields["logit_scale"] = 1 / config.logits_divisor
        case "gemma3":
            fields[_LOCAL_THETA] = config.local_rope_theta
            fields[_PATTERN] = window_pattern(config)
        case "granite":
            fields |= {key: float(_scale(config, name)) for key, name in _SCALES.items()}
    fields |= _scaling_fields(config)
    architecture = ARCHITECTURES[config.family].name
    fields = {f"{architecture}.{key}": value for key, value in fields.items()}
    if (scaling := config.rope_scaling) and scaling.kind == "llama3":
        fields |= scaling_fields(scaling)
    return fields


def _scale(config: ModelConfig, name: str) -> float:
    return config.score_scale if name == "attention_scale" else getattr(config, name)


def _scaling_fields(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {}
    factor = {"rope.scaling.factor": scaling.factor}
    length = {"rope.scaling.original_context_length": scaling.original_context_length}
    match scaling.kind:
        case "linear":
            return factor | {"rope.scaling.type": "linear"}
        case "yarn":
            betas = {"fast": scaling.beta_fast, "slow": scaling.beta_slow}
            return (
                factor
                | length
                | {"rope.scaling.type": "yarn"}
                | {f"rope.scaling.yarn_beta_{name}": float(beta) for name, beta in betas.items()}
            )
        case "longrope":
            attention = {"rope.scaling.attn_factor": scaling.attention_factor}
            if config.context_length == scaling.original_context_length:  # what a LongRoPE allows
                whole = max(config.context_length, round(config.context_length * scaling.factor))
                return length | attention | {"context_length": whole}
            return length | attention
    return {}


def read_config(header: Header) -> ModelConfig:
    """Return the config; raises ModelError for unsupported models, UsageError for bad values."""
    fields, entries = header
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        reason = UNSUPPORTED.get(architecture) if isinstance(architecture, str) else None
        raise ModelError(
            f"unknown GGUF architecture {architecture!r}{f': {reason}' if reason else ''}"[:200],
            f"use one of {', '.join(sorted(_FAMILIES))}",
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): v for key, v in fields.items() if key.startswith(prefix)}
    if own.get("expert_count", 0) != 0:
        raise ModelError(f"it has {own['expert_count']!r} experts"[:200], _UNSUPPORTED)
    for key, value in _SUPPORTED.items():
        _require(own, key, value)
    if "token_embd.weight" not in entries:
        raise ModelError("token_embd.weight is missing", "download the file again: it is damaged")
    values = _read_shape(own) | {
        "vocab_size": entries["token_embd.weight"].shape[0],
        "tied_embeddings": "output.weight" not in entries,
    }
    family, window = _FAMILIES[architecture], own.get("attention.sliding_window", 0)
    # llama.cpp runs a mistral as a llama and ignores the window
    if window != 0:
        family = {"llama": "mistral", "olmo2": "olmo3"}.get(family, family)
    layered = ("olmo3", "cohere2", "exaone4")
    if window != 0 and family in ("mistral", "phi3", "gemma3", "starcoder2", *layered):
        values["sliding_window"] = _integer(own, "attention.sliding_window")
    implied = FAMILIES[family]
    rms = "_rms" if implied["norm"] == "rms_norm" else ""
    values["norm_eps"] = _number(own, f"attention.layer_norm{rms}_epsilon")
    if implied["position"] == "rotary":
        values |= _read_rope(header, own, values)
    if implied["position"] == "rotary" and family not in ("gemma3", "olmo3"):
        _require(own, _LOCAL_THETA, own.get("rope.freq_base", 10_000.0))
    values |= _read_family(family, own, values)
    if family == "stablelm":
        values["norm_placement"] = "pre" if "blk.0.ffn_norm.weight" in entries else "shared"
    values |= {name: BIASES[name] in entries for name in ARCHITECTURES[family].optional_biases}
    if _ATTENTION_BIASES.issubset(ARCHITECTURES[family].optional_biases):
        lacks, has = sorted(_ATTENTION_BIASES, key=lambda name: values[name])
        if values[has] and not values[lacks]:
            raise ModelError(f"it has {BIASES[has]}, but not {BIASES[lacks]}", _UNSUPPORTED)
    return ModelConfig(**implied | values, family=family)


def _read_shape(own: Mapping[str, Any]) -> dict[str, Any]:
    d_model, n_heads = _integer(own, "embedding_length"), _integer(own, "attention.head_count")
    n_layers = _integer(own, "block_count")
    require_layers(n_layers, "it has")
    head_dim = _integer(own, "attention.key_length", d_model // n_heads)
    if own.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"its head size is {head_dim}, but attention.value_length="
            f"{own['attention.value_length']!r}"[:200],
            _UNSUPPORTED,
        )
    return {
        "context_length": _integer(own, "context_length"),
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": _integer(own, "attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_ff": _integer(own, "feed_forward_length"),
    }


def _read_rope(header: Header, own: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions; LongRoPE also limits the context length."""
    rotated = _integer(own, "rope.dimension_count", shape["head_dim"])
    theta = _number(own, "rope.freq_base", 10_000.0)
    scaling = _rope_scaling(header, own, theta, rotated)
    values: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if rotated != shape["head_dim"]:
        values["rotary_dim"] = rotated
    if scaling and scaling.kind == "longrope":
        original = scaling.original_context_length
        values["context_length"] = min(original, shape["context_length"])
    return values


def _read_family(family: str, own: Mapping[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that only one family has."""
    layers = range(shape["n_layers"])
    match family:
        case "gpt_neox":
            parallel = own.get("use_parallel_residual", True) is True
            return {"norm_placement": "parallel" if parallel else "pre"}
        case "gemma":
            return {"embedding_scale": math.sqrt(shape["d_model"])}
        case "cohere":
            return {"logits_divisor": 1 / _number(own, "logit_scale")}
        case "olmo3":
            local = _number(own, _LOCAL_THETA, shape["rope_theta"])
            return {"local_rope_theta": local} | _windows(own, WINDOW_STEP, layers)
        case "cohere2":
            windows = _windows(own, WINDOW_STEP, layers)
            divisor = {"logits_divisor": 1 / _number(own, "logit_scale")}
            return divisor | windows | {"rope_layers": windows["sliding_layers"]}
        case "exaone4":
            windows = _windows(own, exaone_step(len(layers)), layers)
            if not any(windows["sliding_layers"] or ()):
                return {"sliding_window": None}
            return windows | {"rope_layers": windows["sliding_layers"]}
        case "gemma3":
            return {
                "embedding_scale": math.sqrt(shape["d_model"]),
                "attention_scale": gemma_scale(shape),
                "local_rope_theta": _number(own, _LOCAL_THETA, 10_000.0),
            } | _windows(own, _GEMMA_PATTERN, layers)
        case "smollm3":
            rotates = tuple((layer + 1) % NOPE_STEP != 0 for layer in layers)
            return {"rope_layers": None if all(rotates) else rotates}
        case "granite":
            scales = {name: _number(own, key, 0.0) for key, name in _SCALES.items()}
            return {name: scale for name, scale in scales.items() if scale}
    return {}


def _windows(own: Mapping[str, Any], n: int, layers: range) -> dict[str, Any]:
    """Return which layers have the window: those of a list in the file, or all but every n-th,
    where a number in the file replaces n."""
    if isinstance(listed := own.get(_PATTERN), array):
        sliding = tuple(value != 0 for value in listed)
    else:
        n = _integer(own, _PATTERN, n)
        sliding = tuple((layer + 1) % n != 0 for layer in layers)
    return {"sliding_layers": None if all(sliding) else sliding}


def _require(own: Mapping[str, Any], key: str, supported: object) -> None:
    """Raise ModelError if a field has another value than the only one that is supported."""
    if own.get(key, supported) != supported:
        raise ModelError(f"it has {key}={own[key]!r}"[:200], _UNSUPPORTED)


def _rope_scaling(
    header: Header, own: Mapping[str, Any], theta: float, n_rotated: int
) -> RopeScaling | None:
    entries = header.tensors
    if tensor_names.SHORT_FACTORS in entries and tensor_names.LONG_FACTORS in entries:
        return _longrope(header, own, n_rotated)
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        _require(own, key, 1.0)
    kind = own.get("rope.scaling.type", "linear")
    # the second key is the older one
    key = "rope.scaling.factor" if "rope.scaling.factor" in own else "rope.scale_linear"
    scaled = own.get(key, 0) not in (0, 1)
    entry = entries.get(tensor_names.ROPE_FREQS)
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"unsupported RoPE scaling {kind!r}"[:200], HINT)
    if entry and scaled:
        raise ModelError(f"it has {tensor_names.ROPE_FREQS} and {key}", HINT)
    if entry is None:
        if kind == "none" or not scaled:
            return None
        factor = _number(own, key, 1.0)
        if kind == "linear":
            return RopeScaling(kind="linear", factor=factor)
        length = _integer(own, "rope.scaling.original_context_length", own.get("context_length"))
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_context_length=length,
            beta_fast=_number(own, "rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=_number(own, "rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=yarn_attention_factor(factor),
        )
    if entry.shape != (n_rotated // 2,):
        raise _wrong_shape(tensor_names.ROPE_FREQS, entry.shape, n_rotated)
    (divisors,) = read_tensors({tensor_names.ROPE_FREQS: entry}).values()
    return infer_scaling(theta, to_float32(np.asarray(divisors)), header.fields)


def _longrope(header: Header, own: Mapping[str, Any], n_rotated: int) -> RopeScaling:
    names = (tensor_names.SHORT_FACTORS, tensor_names.LONG_FACTORS)
    for name in names:
        if header.tensors[name].shape != (n_rotated // 2,):
            raise _wrong_shape(name, header.tensors[name].shape, n_rotated)
    read = read_tensors({name: header.tensors[name] for name in names})
    short, long = (tuple(to_float32(np.asarray(read[name])).tolist()) for name in names)
    context_length = _integer(own, "context_length")
    length = _integer(own, "rope.scaling.original_context_length", context_length)
    return RopeScaling(
        kind="longrope",
        factor=context_length / length,
        original_context_length=length,
        attention_factor=_number(own, "rope.scaling.attn_factor", 1.0),
        short_factor=short,
        long_factor=long,
    )


def _wrong_shape(name: str, shape: tuple[int, ...], n_rotated: int) -> ModelError:
    return ModelError(f"{name} has shape {list(shape)} (expected {[n_rotated // 2]})", _DAMAGED)


def _integer(own: Mapping[str, Any], key: str, default: int | None = None) -> int:
    return require_positive_integer(own.get(key, default), key, "it has")


def _number(own: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number stored as float32, as the shortest decimal that gives this float32."""
    value = own.get(key, default)
    if not isinstance(value, float) or not 0 <= value < math.inf or (value == 0 and default != 0):
        raise invalid_value(key, value, "a positive number", "it has")
    return float(str(np.float32(value)))
