"""RoPE and sliding windows in config.json, both ways, in the spellings of transformers 4.57 and 5.

For RoPE, version 4 has `rope_theta` and `rope_scaling`, and some families keys of their own.
Version 5 has `rope_parameters`, for some families one object per type of layer. Files get both:
each version silently ignores the other's.
"""

import math
from collections.abc import Mapping
from typing import Any

from tgen.checkpoint.hf.config_values import (
    ConfigValues,
    invalid_value,
    require_number,
    require_positive_integer,
)
from tgen.checkpoint.hf.families import FAMILY_LAYOUTS, FULL, SLIDING
from tgen.config import ModelConfig, RopeScaling
from tgen.errors import ModelError

_DAMAGED = "download the file again: it is damaged"
_LOCAL_THETA = "rope_local_base_freq"  # version 4's theta of Gemma's layers with a window
_ORIGINAL = "original_max_position_embeddings"
_QUERY_GROWTH = "llama_4_scaling_beta"  # of Ministral


def read_rope(family: str, values: ConfigValues, *, head_dim: int) -> dict[str, Any]:
    """Return the rope fields of ModelConfig, and `context_length` where the scaling limits it.

    Raises ModelError for unsupported values.
    """
    json = values.json
    keys = ("rope_theta", "partial_rotary_factor")
    older_keys = ("rotary_emb_base", "rotary_pct") if family == "gpt_neox" else keys
    older = {key: json.get(older) for key, older in zip(keys, older_keys, strict=True)}
    older |= _object(json.get("rope_scaling"))
    newer, newer_local = _object(json.get("rope_parameters")), _object(None)
    if "rope_parameters" in values.defaults and not newer and json.get("rope_scaling") is None:
        older, newer = {}, _object(values.defaults["rope_parameters"])
    if newer.keys() & {FULL, SLIDING}:
        newer, newer_local = _object(newer.get(FULL)), _object(newer.get(SLIDING))
    rope = _merge(family, older, newer)
    fraction = _number(rope, "partial_rotary_factor", values.defaults.get(keys[1], 1.0))
    rotated = int(head_dim * fraction)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ModelError(
            f"config.json has partial_rotary_factor={fraction}",
            f"set it so that an even number of the {head_dim} dimensions of a head is rotated",
        )
    context_length = values.integer("max_position_embeddings")
    if family != "ministral3":
        rope.pop(_QUERY_GROWTH, None)
    theta = _number(rope, "rope_theta", values.defaults["rope_theta"])
    if family == "hunyuan" and rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        theta *= _number(rope, "alpha") ** (head_dim / (head_dim - 2))  # for texts of any length
        rope["rope_type"] = "default"
    scaling = _read_scaling(rope, values, context_length)
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if scaling and (scaling.kind == "longrope" or family == "ministral3"):
        fields["context_length"] = min(context_length, scaling.original_context_length)
    if rotated != head_dim:
        fields["rotary_dim"] = rotated
    if family in ("gemma3", "olmo3"):
        local = _merge(family, {"rope_theta": json.get(_LOCAL_THETA)}, newer_local)
        if (kind := local.get("rope_type", "default")) != "default":
            raise ModelError(
                f"config.json: RoPE type {kind!r} of {SLIDING}"[:200],
                f"set rope_type of {SLIDING} to default",
            )
        default = theta if family == "olmo3" else 10_000.0
        fields["local_rope_theta"] = _number(local, "rope_theta", default)
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
        parameters = {FULL: parameters, SLIDING: local}
        if config.family == "gemma3":
            json[_LOCAL_THETA] = config.local_rope_theta
    if scaling and (scaling.kind == "longrope" or config.family == "ministral3"):
        length = scaling.original_context_length
        if config.context_length == length:
            json["max_position_embeddings"] = max(length, round(length * scaling.factor))
    if scaling and scaling.kind == "longrope":
        json[_ORIGINAL] = scaling.original_context_length
        if config.family == "phi3":  # version 4 refuses other keys
            factors = {key: rope[key] for key in ("short_factor", "long_factor")}
            json["rope_scaling"] = {"type": "longrope"} | factors
    return json | {"rope_parameters": parameters}


def _scaling_json(scaling: RopeScaling) -> dict[str, Any]:
    json: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    length = {_ORIGINAL: scaling.original_context_length}
    match scaling.kind:
        case "llama3":
            json |= length
            json |= {n: getattr(scaling, n) for n in ("low_freq_factor", "high_freq_factor")}
        case "yarn":
            names = ("beta_fast", "beta_slow", "attention_factor")
            json |= length | {name: getattr(scaling, name) for name in names}
            json |= {} if scaling.truncate else {"truncate": False}
            json |= {_QUERY_GROWTH: scaling.query_growth} if scaling.query_growth else {}
        case "longrope":
            json |= length | {"attention_factor": scaling.attention_factor}
            json |= {n: list(getattr(scaling, n)) for n in ("short_factor", "long_factor")}
    return json


def _merge(family: str, older: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of both versions' keys; raises ModelError if they disagree."""
    merged: dict[str, Any] = {}
    for source in (older, newer):
        for key, value in source.items():
            name = "rope_type" if key == "type" else key
            if family == "phi3" and name == "rope_type" and value in ("su", "yarn"):
                value = "longrope"  # older names
            if value is not None and merged.setdefault(name, value) != value:
                raise ModelError(
                    f"config.json has {name}={merged[name]!r} and {value!r}"[:200],
                    "remove rope_parameters, or the same keys outside it",
                )
    return merged


def _read_scaling(
    rope: Mapping[str, Any], values: ConfigValues, context_length: int
) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    original = values.get(_ORIGINAL) if _ORIGINAL in values else None
    original = rope.get(_ORIGINAL) if original is None else original
    original = context_length if original is None else original
    n = require_positive_integer(original, _ORIGINAL)
    ratio = context_length / n
    match kind:
        case "default":
            return None
        case "linear" | "dynamic":
            return RopeScaling(kind=kind, factor=_number(rope, "factor"))
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            numbers = {name: _number(rope, name) for name in names}
            return RopeScaling(**numbers, original_context_length=n)  # type: ignore[arg-type]
        case "yarn":
            factor = _number(rope, "factor", ratio)
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_context_length=n,
                beta_fast=_number(rope, "beta_fast", 32.0),
                beta_slow=_number(rope, "beta_slow", 1.0),
                truncate=rope.get("truncate") is not False,
                attention_factor=_number(rope, "attention_factor", _yarn_factor(rope, factor)),
                query_growth=_number(rope, _QUERY_GROWTH, 0.0),
            )
        case "longrope":
            factor = _number(rope, "factor", ratio)
            attention = (
                math.sqrt(1 + math.log(factor) / math.log(n)) if factor > 1 and n > 1 else 1.0
            )
            return RopeScaling(
                kind="longrope",
                factor=factor,
                original_context_length=n,
                attention_factor=_number(rope, "attention_factor", attention),
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

    m, all_dim = (_number(rope, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    return scale(m) / scale(all_dim) if m and all_dim else scale(1.0)


def _number(rope: Mapping[str, Any], key: str, default: float | None = None) -> float:
    return require_number(rope[key] if default is None else rope.get(key, default), key)


def _numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    value = rope[key]
    if not isinstance(value, list) or not value:
        raise invalid_value(key, value, "a list of numbers")
    return tuple(require_number(number, key) for number in value)


def _object(value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelError("config.json: the rope parameters are not an object", _DAMAGED)
    return value


def read_layer_types(family: str, values: ConfigValues, *, n_layers: int) -> dict[str, Any]:
    """Return the fields of ModelConfig; raises ModelError for unsupported values."""
    if family == "gpt_neo":
        groups, listed = (values.json.get(f"attention_{n}") for n in ("types", "layers"))
        # transformers expands the first to the second, and takes the second if it is there
        kinds = _expand(groups if listed is None else [[listed, 1]], n_layers)
        window = values.integer("window_size")
        return _windows(window, [kind == "local" for kind in kinds])
    types = values.json.get("layer_types")
    if (n := FAMILY_LAYOUTS[family].pattern) is not None:
        if types is None:
            listed = values.json.get("sliding_window_pattern")
            n = require_positive_integer(n if listed is None else listed, "sliding_window_pattern")
            types = [FULL if (i + 1) % n == 0 else SLIDING for i in range(n_layers)]
        sliding = _sliding(types, n_layers)
        window = values.get("sliding_window")
        if window is None and any(sliding):
            raise ModelError(
                f"config.json has sliding_window=None, but layers with {SLIDING}",
                "set sliding_window to a positive integer",
            )
        fields = _windows(window, sliding)
        if family == "cohere2" or (family == "exaone4" and window is not None):
            fields["rope_layers"] = None if all(sliding) else tuple(sliding)
        return fields
    if FAMILY_LAYOUTS[family].windowed:
        window = values.get("sliding_window")
        if types is None or window is None:
            return _windows(window, [True] * n_layers)
        sliding = _sliding(types, n_layers)
        if len(set(sliding)) > 1:
            raise ModelError(
                f"config.json has layer_types with {FULL} and {SLIDING}",
                f"use a {family} model with the same type in all layers",
            )
        return _windows(window, sliding)
    if types is not None and any(_sliding(types, n_layers)):
        raise ModelError(
            f"config.json has layer_types with {SLIDING}",
            f"use a {family} model with {FULL} only",
        )
    return _rope_layers(values, n_layers) if family == "smollm3" else {}


def layer_types_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json."""
    layers = range(config.n_layers)
    sliding = [config.window(layer) is not None for layer in layers]
    match config.family:
        case "gpt_neo":
            types = ["local" if local else "global" for local in sliding]
            return {
                "attention_types": [[types, 1]],
                "window_size": config.sliding_window or config.context_length,
            }
        case "smollm3":
            rotated = [config.rope(layer) is not None for layer in layers]
            return {"no_rope_layers": [int(rope) for rope in rotated]}  # 1 means that it rotates
    if FAMILY_LAYOUTS[config.family].pattern is not None:
        types = [SLIDING if local else FULL for local in sliding]
        window = config.sliding_window or config.context_length
        if config.family == "exaone4" and config.rope(0) is not None and not any(sliding):
            return {"sliding_window": None, "layer_types": types}  # layers without one rotate
        return {"sliding_window": window, "layer_types": types}
    windowed = FAMILY_LAYOUTS[config.family].windowed
    return {"sliding_window": config.sliding_window} if windowed else {}


def _windows(window: object, sliding: list[bool]) -> dict[str, Any]:
    if window is None or not any(sliding):
        return {"sliding_window": None}
    size = require_positive_integer(window, "sliding_window")
    return {"sliding_window": size, "sliding_layers": None if all(sliding) else tuple(sliding)}


def _sliding(types: object, n_layers: int) -> list[bool]:
    if (
        not isinstance(types, list)
        or len(types) != n_layers
        or not all(kind in (FULL, SLIDING) for kind in types)
    ):
        expected = f"a list of {n_layers} values, each {FULL} or {SLIDING}"
        raise invalid_value("layer_types", types, expected)
    return [kind == SLIDING for kind in types]


def _expand(groups: object, n_layers: int) -> list[str]:
    """Return the types of GPT-Neo's layers: each group is some types and how often they repeat."""
    types: list[str] = []
    try:
        for kinds, n in [[["global", "local"], 12]] if groups is None else groups:  # type: ignore[attr-defined]
            kinds = list(kinds)[: n_layers + 1]
            types += kinds * min(n, n_layers // max(1, len(kinds)) + 1)
            if len(types) > n_layers:
                break
    except (TypeError, ValueError):
        types = []
    if len(types) != n_layers or not set(types) <= {"global", "local"}:
        expected = f"groups of {n_layers} values, each global or local"
        raise invalid_value("attention_types", groups, expected)
    return types


def _rope_layers(values: ConfigValues, n_layers: int) -> dict[str, Any]:
    listed = values.json.get("no_rope_layers")
    if listed is None:
        n = values.json.get("no_rope_layer_interval")
        n = require_positive_integer(4 if n is None else n, "no_rope_layer_interval")
        listed = [int((i + 1) % n != 0) for i in range(n_layers)]
    if not isinstance(listed, list) or len(listed) != n_layers or not set(listed) <= {0, 1}:
        raise invalid_value("no_rope_layers", listed, f"a list of {n_layers} values, each 0 or 1")
    rotated = tuple(value == 1 for value in listed)
    return {"rope_layers": None if all(rotated) else rotated}
