"""config.json in the wild: what tgen reads equals what transformers fills in."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from support.transformers_models import GROUPED, MORE_VARIANTS, VARIANTS, YARN, make_config
from tgen.checkpoint.hf.config import from_json, to_json
from tgen.config import ModelConfig, RopeScaling
from tgen.errors import ModelError

transformers = pytest.importorskip("transformers")
IN_VERSION_5 = MORE_VARIANTS if transformers.__version__ >= "5" else {}

# Sizes whose absence tgen refuses: transformers would take those of some published model.
SIZES = {
    "vocab_size",
    *("hidden_size", "n_embd", "num_hidden_layers", "num_layers", "n_layer"),
    *("num_attention_heads", "num_heads", "n_head", "intermediate_size"),
}
MAY_LACK = ("gpt_neo", "intermediate_size")  # its default is four times the hidden size


def write(variant: str, path) -> dict[str, Any]:
    """Return the config.json that transformers writes."""
    make_config(variant, vocab_size=300).save_pretrained(path)
    return json.loads((path / "config.json").read_text())


def filled_in(values: dict[str, Any]) -> ModelConfig | None:
    """Read what transformers makes of a config.json; None if either refuses it."""
    try:
        kind = transformers.CONFIG_MAPPING[values["model_type"]]
        return from_json(kind.from_dict(deepcopy(values)).to_dict())
    except Exception:  # of many kinds
        return None


def changed(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object without each key, and with null there, in inner objects too."""
    for key, value in values.items():
        without = {name: v for name, v in values.items() if name != key}
        yield key, without
        yield key, values | {key: None}
        if isinstance(value, dict):
            for inner, smaller in changed(value):
                yield f"{key}.{inner}", values | {key: smaller}


def in_older_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json that version 4 would have written."""
    older = dict(values)
    rope = older.pop("rope_parameters", None)
    if "dtype" in older:
        older["torch_dtype"] = older.pop("dtype")
    if rope is None:
        return older
    if "full_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    if scaling["rope_type"] == "longrope":
        scaling["type"] = scaling.pop("rope_type")
    older["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
    neox = values["model_type"] == "gpt_neox"
    older["rotary_emb_base" if neox else "rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        name = "rotary_pct" if neox else "partial_rotary_factor"
        older[name] = rope["partial_rotary_factor"]
    return older


@pytest.mark.parametrize("older", [False, True], ids=["5", "4"])
@pytest.mark.parametrize("variant", VARIANTS | IN_VERSION_5)
def test_missing_and_null_keys_are_what_transformers_fills_in(variant, older, tmp_path):
    values = known = write(variant, tmp_path)
    expected = from_json(values)
    if older:
        values = in_older_spelling(values)
    assert from_json(values) == expected
    n_compared = 0
    for key, smaller in changed(values):
        name = key.partition(".")[0]
        if older and name in known and known[name] == values[name]:
            continue  # spelled as in version 5
        if (
            key in SIZES
            and key not in smaller
            and f"{variant} {key}" != "gpt_neo intermediate_size"
        ):
            with pytest.raises(ModelError, match="lacks '"):
                from_json(smaller)
            continue
        theirs = filled_in(smaller)
        if theirs is not None:
            assert from_json(smaller) == theirs, key
            n_compared += 1
    assert older or n_compared >= 15


ODD = [
    None, True, "false", -1, 0, 0.0, 1.5, 10**400, float("inf"), float("nan"), [], {}, [[]], [3],
    [True], [[["local"], 10**9]], {"a": 1}, {"rope_type": "yarn"}, {"type": ["yarn"]},
]  # fmt: skip


def with_odd_values(values: Any) -> Iterator[Any]:
    """Yield the object with each value replaced by each of `ODD`, at any depth."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        inner = with_odd_values(value) if isinstance(value, dict | list) else iter(())
        for odd in itertools.chain(ODD, inner):
            copy = values.copy()
            copy[key] = odd
            yield copy


def error_of(values: dict[str, Any]) -> ModelError | None:
    """Read a config.json, and what tgen writes of it; return the error."""
    try:
        config = from_json(values)
    except ModelError as error:
        return error
    assert from_json(to_json(config, begin=0, end=0, pad=0)) == config
    return None


@pytest.mark.parametrize("variant", VARIANTS)
def test_mistyped_value_is_a_model_error_or_ignored(variant, tmp_path):
    values = write(variant, tmp_path)
    both = itertools.chain(with_odd_values(values), with_odd_values(in_older_spelling(values)))
    errors = [error for odd in both if (error := error_of(odd))]
    assert len(errors) > 50
    assert all(error.hint and len(error.message) < 300 for error in errors)


ROPE_KEYS = ("rope_", "rotary_", "partial_rotary_")
NEWER: dict[str, dict[str, Any]] = {
    "llama yarn": {"rope_parameters": YARN | {"rope_theta": 500.0}},
    "gpt_neox": {
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        }
    },
    "gemma3_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }
    },
}
OLDER: dict[str, dict[str, Any]] = {
    "llama yarn": {"rope_scaling": YARN, "rope_theta": 500.0},
    "gpt_neox": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rotary_emb_base": 500.0,
        "rotary_pct": 0.5,
    },
    "gemma3_text": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_theta": 500.0,
        "rope_local_base_freq": 100.0,
    },
}
CONTRADICTIONS: dict[str, list[dict[str, Any]]] = {
    "llama yarn": [
        {"rope_theta": 501.0},
        {"rope_scaling": YARN | {"factor": 5.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
    "gpt_neox": [{"rotary_emb_base": 501.0}, {"rotary_pct": 0.25}],
    "gemma3_text": [{"rope_theta": 501.0}, {"rope_local_base_freq": 101.0}],
}


@pytest.mark.parametrize("variant", NEWER)
def test_both_spellings_of_rope_are_equal_and_must_agree(variant, tmp_path):
    values = write(variant, tmp_path)
    values = {key: value for key, value in values.items() if not key.startswith(ROPE_KEYS)}
    older, newer = values | OLDER[variant], values | NEWER[variant]
    expected = from_json(newer)
    assert expected.rope_theta == 500
    assert from_json(older) == from_json(older | newer) == expected
    ours = to_json(expected, begin=0, end=0, pad=0)
    assert from_json(ours) == expected
    assert OLDER[variant].keys() | NEWER[variant].keys() <= ours.keys()  # both are written
    for difference in CONTRADICTIONS[variant]:
        with pytest.raises(ModelError) as caught:
            from_json(older | newer | difference)
        assert " and " in caught.value.message
        assert "rope_parameters" in caught.value.hint


def read(kind: str, **values: object) -> ModelConfig:
    sizes = GROUPED | {"vocab_size": 300, "model_type": kind, "rotary_pct": 0.5}
    sizes["attention_types"] = [[["global"], 3]]
    return from_json(sizes | values)


def test_rotated_dimensions_may_be_any_even_number():
    for fraction, n_rotated in ((0.25, 4), (0.4, 6), (0.63, 10), (1.0, 16)):
        config = read("gpt_neox", hidden_size=64, rotary_pct=fraction)
        assert config.n_rotated == n_rotated
        assert from_json(to_json(config, begin=0, end=0, pad=0)) == config
    for fraction in (0.2, 0.7, 0.0, 1.1):
        with pytest.raises(ModelError, match="partial_rotary_factor="):
            read("gpt_neox", hidden_size=64, rotary_pct=fraction)


def test_longrope_limits_the_context_to_the_original_length():
    scaling = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    config = read("phi3", rope_scaling=scaling, original_max_position_embeddings=64)
    assert config.context_length == 64
    assert config.rope_scaling == RopeScaling(
        kind="longrope",
        factor=2.0,
        original_context_length=64,
        attention_factor=math.sqrt(1 + math.log(2) / math.log(64)),
        short_factor=(1.0,) * 6,
        long_factor=(2.0,) * 6,
    )
    written = to_json(config, begin=0, end=0, pad=0)
    assert written["max_position_embeddings"] == 128
    assert from_json(written) == config
    stretched = scaling | {"factor": 1.5}
    shorter = read("phi3", rope_scaling=stretched, original_max_position_embeddings=200)
    assert shorter.context_length == 128
    assert from_json(to_json(shorter, begin=0, end=0, pad=0)) == shorter
    for kind in ("su", "yarn"):  # older names of the same
        older = scaling | {"type": kind}
        assert config == read("phi3", rope_scaling=older, original_max_position_embeddings=64)
    with pytest.raises(ModelError, match="short_factor"):
        read("phi3", rope_scaling=scaling | {"short_factor": [1.0] * 5})


SINGULAR = {"factor": 2.0, "mscale": 1.0, "mscale_all_dim": -1 / (0.1 * math.log(2))}
REFUSED = {
    "another RoPE": ("llama", {"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
    "scaled local RoPE": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "linear.* of sliding_attention",
    ),
    "soft cap": ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30"),
    "encoder": ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    "window": ("smollm3", {"use_sliding_window": True}, "use_sliding_window"),
    "window in llama": ("llama", {"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
    "short layer_types": ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types"),
    "chunked": ("gemma3_text", {"layer_types": ["chunked_attention"] * 3}, "chunked"),
    "short no_rope_layers": ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    "attention_types": ("gpt_neo", {"attention_types": [[["global"], 2]]}, "attention_types"),
    "relu": ("gpt_neox", {"hidden_act": "relu6"}, "relu6"),
    "zero scale": ("granite", {"logits_scaling": 0.0}, "logits_scaling: invalid"),
    "zero local theta": ("gemma3_text", {"rope_local_base_freq": 0.0}, "local_rope_theta"),
    "negative window": ("phi3", {"sliding_window": -3}, "sliding_window"),
    "no window": ("gemma3_text", {"sliding_window": None}, "sliding_window=None"),
    "word as a flag": ("gpt_neox", {"use_parallel_residual": "no"}, "use_parallel_residual"),
    "other gate": ("llama", {"hidden_act": "gelu_new"}, "'gelu_new'; use one of silu, swish$"),
    "layer types": (
        "mistral",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "layer_types with .* use a mistral model with the same type in all layers",
    ),
    "kv heads": (
        "llama",
        {"num_key_value_heads": 3},
        "num_key_value_heads: .* 3; set num_key_value_heads to a divisor of num_attention_heads=4",
    ),
    "OPT-350M": ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    "projected embeddings": ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim=16"),
    "clipped queries": ("olmo", {"clip_qkv": 8.0}, r"clip_qkv=8\.0"),
    "command-r-plus": ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
    "other activation": ("arcee", {"hidden_act": "relu"}, "activation.*to relu2"),
    "zero logit scale": ("cohere", {"logit_scale": 0}, "logit_scale=0.0; .* a number > 0"),
    "negative logit scale": ("cohere2", {"logit_scale": -1}, "logit_scale=-1.0; .* > 0"),
    "too large": ("llama", {"vocab_size": 2**31}, "an integer from 1 to 2,147,483,647"),
    "division by zero": ("llama", {"rope_scaling": YARN | SINGULAR}, "invalid value"),
    "theta without a logarithm": ("llama", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta"),
} | {
    f"too many layers in {kind}": (kind, {"num_hidden_layers": 2**31 - 1}, "2,147,483,647 layers")
    for kind in ("mistral", "gemma3_text", "smollm3", "gpt_neo")
}


def test_expanded_layers_win_over_the_groups_as_in_transformers():
    layers = ["local", "local", "global"]
    config = read("gpt_neo", attention_layers=layers)
    assert config.sliding_layers == (True, True, False)


@pytest.mark.parametrize(("kind", "values", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_values_are_refused_by_name(kind, values, message):
    read(kind)
    with pytest.raises(ModelError) as caught:
        read(kind, **values)
    assert caught.value.hint
    assert re.search(message, f"{caught.value.message}; {caught.value.hint}")


def test_an_impossible_default_is_named_as_one():
    for values in ({"rope_parameters": {"rope_theta": 0}}, {"rope_theta": 0}):
        with pytest.raises(ModelError, match=r"rope_theta: invalid value 0\.0$"):
            read("smollm3", **values)
    sizes = {name: value for name, value in GROUPED.items() if name != "num_key_value_heads"}
    with pytest.raises(
        ModelError, match=r"num_key_value_heads.* 8; this is the default of mistral"
    ):
        from_json(sizes | {"vocab_size": 300, "model_type": "mistral"})


@pytest.mark.parametrize(
    ("kind", "reason"), [("gemma2", "soft caps"), ("nanochat", "soft cap"), ("apertus", "xIELU")]
)
def test_known_models_that_are_not_supported_are_refused_with_the_reason(kind, reason):
    with pytest.raises(ModelError, match=f"unsupported model type '{kind}': .*{reason}") as caught:
        read(kind)
    assert "olmo2" in caught.value.hint


OTHER_MODELS = {
    "llava": ({"text_config": {"model_type": "vicuna"}, "vision_config": {}}, "images"),
    "mixtral": ({"num_local_experts": 8}, "mixture of experts"),
    "qwen3_moe": ({"num_experts": 128}, "mixture of experts"),
    "granitemoe": ({"num_local_experts": 40}, "mixture of experts"),
    "olmo_hybrid": ({}, "olmo2"),
}


@pytest.mark.parametrize(("kind", "values", "hint"), [(k, *v) for k, v in OTHER_MODELS.items()])
def test_other_model_types_are_refused_with_what_they_are(kind, values, hint):
    with pytest.raises(ModelError, match=f"unknown model type '{kind}'") as caught:
        read(kind, **values)
    assert re.search(hint, caught.value.hint)
