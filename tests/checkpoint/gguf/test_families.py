"""Every family that llama.cpp has, written to a GGUF file and read again."""

import math

import numpy as np
import pytest

from support.models import make_model
from tgen.checkpoint import model_dir
from tgen.checkpoint.gguf import config_fields
from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.checkpoint.gguf.architectures import ARCHITECTURES, check_supported, describe_differences
from tgen.checkpoint.gguf.writer import write_gguf
from tgen.config import FAMILIES, RopeScaling
from tgen.errors import ModelError

pytest.importorskip("gguf")

LONGROPE = RopeScaling(
    kind="longrope",
    factor=4.0,
    original_context_length=48,
    attention_factor=1.25,
    short_factor=(1.0, 1.5, 2.0),
    long_factor=(2.0, 3.0, 4.0),
)
YARN = RopeScaling(
    kind="yarn",
    factor=4.0,
    original_context_length=16,
    attention_factor=0.1 * math.log(4) + 1,
    beta_fast=16.0,
)
LINEAR = RopeScaling(kind="linear", factor=4.0)
GEMMA = {"attention_scale": 0.25}  # 1 / sqrt(head_dim)
WINDOWS = {"n_layers": 5, "sliding_layers": (True, True, True, False, True)}
OLMO3 = WINDOWS | {"local_rope_theta": 500_000.0}
SMOLLM3 = {"n_layers": 5, "rope_layers": (True, True, True, False, True)}
ROUND_TRIPS = [
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("gpt_neox", {"norm_placement": "pre", "rotary_dim": None, "rope_theta": 500.0}),
    ("llama", {"rope_scaling": YARN, "attention_bias": True, "output_bias": True}),
    ("phi3", {}),
    ("phi3", {"rope_scaling": LONGROPE, "sliding_window": None}),
    ("gemma3", GEMMA),
    ("gemma3", GEMMA | {"n_layers": 5, "sliding_layers": (True, True, False, True, True)}),
    ("gemma3", GEMMA | {"rope_scaling": LINEAR, "sliding_layers": None}),
    ("olmo2", {}),
    ("smollm3", SMOLLM3),
    ("granite", {}),
    ("granite", {"feed_forward_bias": True, "tied_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("starcoder2", {"sliding_window": None}),
    ("starcoder2", {}),
    ("mistral", {"sliding_window": 20}),
    ("gemma", {}),
    ("olmo", {}),
    ("olmo3", OLMO3),
    ("phi", {}),
    ("gpt_bigcode", {}),
    ("stablelm", {}),
    ("stablelm", {"norm_placement": "pre", "attention_bias": True}),
    ("cohere", {}),
    ("cohere2", WINDOWS),
    ("glm4", {}),
    ("arcee", {}),
    ("seed_oss", {}),
    ("hunyuan", {}),
    ("exaone4", {"sliding_window": None, "sliding_layers": None}),
]
REFUSED = [
    ("opt", {}, "the opt family"),
    ("olmo3", OLMO3 | {"n_layers": 2, "sliding_layers": (True, False)}, "sliding_layers"),
    ("olmo3", OLMO3 | {"local_rope_theta": 100.0}, "local_rope_theta"),
    ("cohere2", {}, "sliding_layers"),
    ("exaone4", {}, "sliding_layers"),
    ("cohere", {"tied_embeddings": False}, "an LM head of its own"),
    ("seed_oss", {"output_bias": True}, "output_bias=True in GGUF"),
    ("gpt_neo", {}, "the gpt_neo family"),
    ("gpt_neox", {"attention_bias": False, "output_bias": False}, "attention_bias=False"),
    ("gpt_neox", {"activation": "gelu_tanh"}, "activation=gelu_tanh"),
    ("gemma3", {}, "attention_scale"),
    ("gemma3", GEMMA | {"tied_embeddings": False}, "an LM head of its own"),
    ("gemma3", GEMMA | {"n_layers": 3, "sliding_layers": (False, True, True)}, "sliding_layers"),
    ("gemma3", GEMMA | {"rope_scaling": YARN}, "yarn RoPE scaling"),
    (
        "olmo2",
        {"attention_bias": True, "output_bias": True},
        "attention_bias=True in GGUF",
    ),
    ("smollm3", {}, "rope_layers"),
    ("llama", {"rope_scaling": LONGROPE, "rotary_dim": None}, "longrope RoPE scaling"),
    ("llama", {"rope_scaling": RopeScaling(kind="yarn", factor=4.0)}, "YaRN with attention_factor"),
]


def export(model, tokenizer, path):
    fields = gguf_tokenizer.to_fields(tokenizer, tokenizer.vocab_size, ends=[tokenizer.end_of_text])
    write_gguf(path, model.config, model.to_arrays(), tokenizer_fields=fields)


@pytest.mark.parametrize(("family", "values"), ROUND_TRIPS)
def test_config_and_weights_survive(family, values, tokenizer, tmp_path):
    model = make_model(family, vocab_size=tokenizer.vocab_size, **values)
    export(model, tokenizer, tmp_path / "m.gguf")
    bundle = model_dir.load(tmp_path / "m.gguf")
    assert bundle.config == model.config
    for name, array in model.to_arrays().items():
        # Gemma's norms are stored as 1 + w
        np.testing.assert_allclose(bundle.arrays[name], array, rtol=0, atol=1e-7, err_msg=name)


def test_context_that_is_shorter_than_longrope_allows_survives(tokenizer, tmp_path):
    settings = {"rope_scaling": LONGROPE, "sliding_window": None, "context_length": 40}
    model = make_model("phi3", vocab_size=tokenizer.vocab_size, **settings)
    export(model, tokenizer, tmp_path / "m.gguf")
    assert model_dir.load(tmp_path / "m.gguf").config.context_length == 40


def test_tied_head_is_written_where_llama_cpp_needs_one(tokenizer, tmp_path):
    model = make_model("olmo2", vocab_size=tokenizer.vocab_size, tied_embeddings=True)
    export(model, tokenizer, tmp_path / "m.gguf")
    arrays = model_dir.load(tmp_path / "m.gguf").arrays
    assert np.array_equal(arrays["lm_head.weight"], arrays["token_embedding.weight"])


@pytest.mark.parametrize(("family", "values", "reason"), REFUSED)
def test_what_llama_cpp_lacks_is_refused(family, values, reason, tokenizer, tmp_path):
    if values.get("rope_scaling") is LONGROPE:
        values = values | {"head_dim": 6}  # as many factors as rotated pairs
    model = make_model(family, vocab_size=tokenizer.vocab_size, **values)
    with pytest.raises(ModelError, match=f"llama.cpp does not support {reason}"):
        export(model, tokenizer, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_family_that_only_tgen_cannot_write_is_refused():
    with pytest.raises(ModelError, match="tgen does not write GGUF files of the ministral3 family"):
        check_supported(make_model("ministral3").config)


def test_every_family_is_written_or_refused():
    assert {family for family, *_ in ROUND_TRIPS} == set(ARCHITECTURES)
    assert set(FAMILIES) - set(ARCHITECTURES) == {"classic", "gpt_neo", "opt", "gptj", "ministral3"}


def test_other_attention_factor_is_refused(tokenizer, tmp_path, monkeypatch):
    model = make_model("llama", vocab_size=tokenizer.vocab_size, rope_scaling=YARN)
    scaling_fields = config_fields._scaling_fields
    factor = {"rope.scaling.attn_factor": 0.5}
    monkeypatch.setattr(config_fields, "_scaling_fields", lambda c: scaling_fields(c) | factor)
    export(model, tokenizer, tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"attn_factor=0\.5"):
        model_dir.load(tmp_path / "m.gguf")


def load_with_field(tokenizer, folder, family, key, value, **settings):
    """Load a file with one more field of the architecture."""
    model = make_model(family, vocab_size=tokenizer.vocab_size, **settings)
    to_fields = config_fields.to_fields
    with pytest.MonkeyPatch.context() as patch:
        field = {f"{ARCHITECTURES[family].name}.{key}": value}
        patch.setattr(config_fields, "to_fields", lambda config: to_fields(config) | field)
        export(model, tokenizer, folder / "m.gguf")
    return model_dir.load(folder / "m.gguf").config


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("olmo", "attention.clamp_kqv", 8.0),
        ("gemma", "final_logit_softcapping", 30.0),
        ("hunyuan", "rope.scaling.alpha", 1000.0),
        ("qwen3", "attention.causal", False),
        ("exaone4", "rope.freq_base_swa", 500.0),
    ],
)
def test_field_that_changes_the_numbers_is_refused(family, key, value, tokenizer, tmp_path):
    settings = {"sliding_window": None, "sliding_layers": None} if family == "exaone4" else {}
    with pytest.raises(ModelError, match=f"m.gguf: it has {key}={value}"):
        load_with_field(tokenizer, tmp_path, family, key, value, **settings)


@pytest.mark.parametrize(
    ("pattern", "sliding"),
    [
        (2, (True, False, True, False, True)),
        ([True, False, False, True, True], (True, False, False, True, True)),
    ],
)
def test_pattern_of_windows_is_read(pattern, sliding, tokenizer, tmp_path):
    key = "attention.sliding_window_pattern"
    config = load_with_field(tokenizer, tmp_path, "olmo3", key, pattern, **OLMO3)
    assert config.sliding_layers == sliding


def test_theta_of_layers_with_a_window_is_read(tokenizer, tmp_path):
    config = load_with_field(tokenizer, tmp_path, "olmo3", "rope.freq_base_swa", 500.0, **OLMO3)
    assert config.local_rope_theta == 500.0


@pytest.mark.parametrize("family", ["phi3", "mistral", "starcoder2"])
def test_window_that_llama_cpp_ignores_is_a_warning(family):
    config = make_model(family, sliding_window=20).config
    (difference,) = describe_differences(config)
    assert "sliding window: texts over 20 tokens" in difference
    assert not describe_differences(make_model(family, sliding_window=48).config)


def test_other_gelu_is_a_warning():
    assert describe_differences(make_model("gpt_neox").config) == [
        "llama.cpp computes GELU by its tanh approximation"
    ]
