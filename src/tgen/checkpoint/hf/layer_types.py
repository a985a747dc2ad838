"""Which layers of config.json have a sliding window or no rotation, both ways."""

from typing import Any

from tgen.checkpoint.hf.config_values import ConfigValues, require_positive_integer
from tgen.checkpoint.hf.families import FAMILY_LAYOUTS, FULL, SLIDING
from tgen.config import ModelConfig
from tgen.errors import ModelError


def read_layer_types(family: str, values: ConfigValues, *, n_layers: int) -> dict[str, Any]:
    """Return the fields of ModelConfig; raises ModelError for unsupported values."""
    types: Any
    match family:
        case "gpt_neo":
            groups, listed = (values.json.get(f"attention_{n}") for n in ("types", "layers"))
            # transformers expands the first to the second, and takes the second if it is there
            types = _expand(groups if listed is None else [[listed, 1]], n_layers)
            window = values.integer("window_size")
            return _windows(window, [kind == "local" for kind in types])
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
        raise ModelError(
            f"config.json has layer_types={types!r}"[:200],
            f"set layer_types to a list of {n_layers} values, each {FULL} or {SLIDING}",
        )
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
        raise ModelError(
            f"config.json has attention_types={groups!r}"[:200],
            f"set attention_types to groups of {n_layers} values, each global or local",
        )
    return types


def _rope_layers(values: ConfigValues, n_layers: int) -> dict[str, Any]:
    listed = values.json.get("no_rope_layers")
    if listed is None:
        n = values.json.get("no_rope_layer_interval")
        n = require_positive_integer(4 if n is None else n, "no_rope_layer_interval")
        listed = [int((i + 1) % n != 0) for i in range(n_layers)]
    if not isinstance(listed, list) or len(listed) != n_layers or not set(listed) <= {0, 1}:
        raise ModelError(
            f"config.json has no_rope_layers={listed!r}"[:200],
            f"set no_rope_layers to a list of {n_layers} values, each 0 or 1",
        )
    rotated = tuple(value == 1 for value in listed)
    return {"rope_layers": None if all(rotated) else rotated}
