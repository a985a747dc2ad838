"""RoPE in config.json, both ways, in the spellings of transformers 4.57 and 5.

Version 4 has `rope_theta` and `rope_scaling`, and some families keys of their own. Version 5 has
`rope_parameters`, for some families one object per type of layer. Files get both: each version
silently ignores the other's.
"""

import math
from collections.abc import Mapping
from typing import Any

from tgen.checkpoint.hf.config_values import (
    ConfigValues,
    require_number,
    require_positive_integer,
)
from tgen.config import ModelConfig, RopeScaling
from tgen.errors import ModelError

_DAMAGED = "download the file again: it is damaged"
# Version 4's spellings in GPT-NeoX, and Gemma's theta of layers with a sliding window.
_THETA, _FRACTION = ("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")
_LOCAL_THETA = "rope_local_base_freq"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def read_rope(family: str, values: ConfigValues, *, head_dim: int) -> dict[str, Any]:
    """Return the rope fields of ModelConfig, and `context_length` where the scaling limits it.

    Raises ModelError for unsupported values.
    """
    json = values.json
    rope, local = _rope(json), None
    if family == "gemma3":
        local = _number(json, (_LOCAL_THETA,), 10_000.0)
        if rope.keys() & {_GLOBAL, _LOCAL}:
            local = _number(_object(rope.get(_LOCAL)), ("rope_theta",), local)
            rope = _object(rope.get(_GLOBAL))
    theta = _number(rope if "rope_theta" in rope else json, _THETA, values.get("rope_theta"))
    fraction = values.get("partial_rotary_factor") if "partial_rotary_factor" in values else 1.0
    source = rope if "partial_rotary_factor" in rope else json
    rotated = int(head_dim * _number(source, _FRACTION, fraction))
    context_length = values.integer("max_position_embeddings")
    scaling = _read_scaling(family, rope, json, context_length)
    fields = {"rope_theta": theta, "rope_scaling": scaling}
    if scaling and scaling.kind == "longrope":
        fields["context_length"] = min(context_length, scaling.original_context_length)
    if rotated != head_dim:
        fields["rotary_dim"] = rotated
    if local is not None:
        fields["local_rope_theta"] = local
    return fields


def rope_json(config: ModelConfig) -> dict[str, Any]:
    """Return the rope's keys of config.json for both versions."""
    scaling, theta = config.rope_scaling, config.rope_theta
    rope: dict[str, Any] = _scaling_json(scaling) if scaling else {"rope_type": "default"}
    parameters = rope | {"rope_theta": theta}
    json: dict[str, Any] = {"rope_theta": theta, "rope_scaling": rope if scaling else None}
    if config.family == "gpt_neox" or config.rotary_dim is not None:
        fraction = config.n_rotated / config.head_dim
        while int(config.head_dim * fraction) < config.n_rotated:  # rounding
            fraction = math.nextafter(fraction, 2)
        parameters["partial_rotary_factor"] = json["partial_rotary_factor"] = fraction
        if config.family == "gpt_neox":
            json |= {"rotary_pct": fraction, "rotary_emb_base": theta}
    if config.local_rope_theta is not None:
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        parameters = {_GLOBAL: parameters, _LOCAL: local}
        json[_LOCAL_THETA] = config.local_rope_theta
    if scaling and scaling.kind == "longrope":
        length = scaling.original_context_length
        json["original_max_position_embeddings"] = length
        json["max_position_embeddings"] = round(length * scaling.factor)
        if config.family == "phi3":  # version 4 refuses other keys
            factors = {key: rope[key] for key in ("short_factor", "long_factor")}
            json["rope_scaling"] = {"type": "longrope"} | factors
    return json | {"rope_parameters": parameters}


def _scaling_json(scaling: RopeScaling) -> dict[str, Any]:
    json: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    length = {"original_max_position_embeddings": scaling.original_context_length}
    match scaling.kind:
        case "llama3":
            json |= length
            json |= {n: getattr(scaling, n) for n in ("low_freq_factor", "high_freq_factor")}
        case "yarn":
            names = ("beta_fast", "beta_slow", "attention_factor")
            json |= length | {name: getattr(scaling, name) for name in names}
            json |= {} if scaling.truncate else {"truncate": False}
        case "longrope":
            json |= length | {"attention_factor": scaling.attention_factor}
            json |= {n: list(getattr(scaling, n)) for n in ("short_factor", "long_factor")}
    return json


def _rope(json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return version 5's rope_parameters, else version 4's rope_scaling; both must agree."""
    older, newer = _object(json.get("rope_scaling")), _object(json.get("rope_parameters"))
    if not newer:
        return older
    flat = _object(newer.get(_GLOBAL)) if newer.keys() & {_GLOBAL, _LOCAL} else newer
    thetas = {json[key] for key in _THETA if isinstance(json.get(key), int | float)}
    differs = "rope_theta" in flat and thetas and thetas != {flat["rope_theta"]}
    for key, value in older.items():
        same_key = "rope_type" if key == "type" else key
        differs = differs or value != flat.get(same_key, flat.get(key, value))
    if differs:
        raise ModelError(
            "config.json: rope_parameters disagrees with rope_theta or rope_scaling",
            "remove rope_parameters, or the other two keys",
        )
    return newer


def _read_scaling(
    family: str, rope: Mapping[str, Any], json: Mapping[str, Any], context_length: int
) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if family == "phi3" and kind in ("su", "yarn"):  # older names
        kind = "longrope"
    original = json.get("original_max_position_embeddings")
    if original is None:
        original = rope.get("original_max_position_embeddings")
    original = context_length if original is None else original
    n = require_positive_integer(original, "original_max_position_embeddings", "config.json has")
    ratio = context_length / n
    match kind:
        case "default":
            return None
        case "linear" | "dynamic":
            return RopeScaling(kind=kind, factor=_number(rope, ("factor",)))
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            numbers = {name: _number(rope, (name,)) for name in names}
            return RopeScaling(**numbers, original_context_length=n)  # type: ignore[arg-type]
        case "yarn":
            factor = _number(rope, ("factor",), ratio)
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_context_length=n,
                beta_fast=_number(rope, ("beta_fast",), 32.0),
                beta_slow=_number(rope, ("beta_slow",), 1.0),
                truncate=rope.get("truncate") is not False,
                attention_factor=_number(rope, ("attention_factor",), _yarn_factor(rope, factor)),
            )
        case "longrope":
            factor = _number(rope, ("factor",), ratio)
            attention = math.sqrt(1 + math.log(factor) / math.log(n)) if factor > 1 < n else 1.0
            return RopeScaling(
                kind="longrope",
                factor=factor,
                original_context_length=n,
                attention_factor=_number(rope, ("attention_factor",), attention),
                short_factor=_numbers(rope, "short_factor"),
                long_factor=_numbers(rope, "long_factor"),
            )
    raise ModelError(
        f"config.json: unknown RoPE type {kind!r}"[:200],
        "use default, linear, dynamic, llama3, yarn or longrope",
    )


def _yarn_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cosines and sines: 0.1 m ln(factor) + 1, or the ratio of two such."""

    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    m, all_dim = (_number(rope, (key,), 0.0) for key in ("mscale", "mscale_all_dim"))
    return scale(m) / scale(all_dim) if m and all_dim else scale(1.0)


def _number(
    values: Mapping[str, Any], keys: tuple[str, ...], default: float | None = None
) -> float:
    key = next((key for key in keys if values.get(key) is not None), None)
    if key is None and default is not None:
        return require_number(default, keys[0])
    return require_number(values[key or keys[0]], key or keys[0])


def _numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    value = rope[key]
    if not isinstance(value, list) or not value:
        raise ModelError(
            f"config.json has {key}={value!r}"[:200], f"set {key} to a list of numbers"
        )
    return tuple(require_number(number, key) for number in value)


def _object(value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelError("config.json: the rope parameters are not an object", _DAMAGED)
    return value
