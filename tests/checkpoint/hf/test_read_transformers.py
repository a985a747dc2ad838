"""Every family against transformers on the same directory, both ways."""

import json

import numpy as np
import pytest
import torch

from support.models import ALL_FAMILIES, make_model
from tgen.checkpoint import model_dir
from tgen.checkpoint.hf.config import from_json
from tgen.config import EngineOptions, RopeScaling, SamplingConfig
from tgen.loaded_model import open_model
from tgen.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

YARN = RopeScaling(kind="yarn", factor=4.0, original_context_length=16, attention_factor=1.2)
VARIANTS = [
    *((family, {}) for family in ALL_FAMILIES),
    ("gpt2", {"d_ff": 96, "activation": "gelu"}),
    ("llama", {"tied_embeddings": False, "attention_bias": True, "output_bias": True}),
    (
        "llama",
        {
            "rope_scaling": RopeScaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=16
            )
        },
    ),
    ("llama", {"rope_scaling": RopeScaling(kind="linear", factor=4.0)}),
    ("gpt_neox", {"rotary_dim": 6, "tied_embeddings": True, "rope_theta": 500.0}),
    ("gpt_neox", {"norm_placement": "pre", "attention_bias": False, "output_bias": False}),
    ("olmo2", {"rope_scaling": YARN, "tied_embeddings": True}),
    ("gemma3", {"rope_scaling": RopeScaling(kind="linear", factor=4.0)}),
    ("mistral", {"sliding_window": None, "tied_embeddings": True, "head_dim": 16}),
    ("qwen3", {"head_dim": 16, "tied_embeddings": False, "rope_theta": 1e6}),
]


def load_theirs(path, **options):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def our_model(path) -> Transformer:
    bundle = model_dir.load(path)
    return Transformer.from_arrays(bundle.config, bundle.arrays)


@pytest.mark.parametrize(("family", "values"), VARIANTS)
def test_logits_are_equal_after_a_round_trip(family, values, tokenizer, tmp_path):
    model = make_model(family, vocab_size=tokenizer.vocab_size, **values)
    model_dir.save(tmp_path / "ours", model.config, tokenizer, model.to_arrays())
    tokens = torch.randint(
        tokenizer.vocab_size, (2, 40), generator=torch.Generator().manual_seed(4)
    )
    with torch.no_grad():
        ours = model(tokens)
        theirs = load_theirs(tmp_path / "ours")
        assert (theirs(tokens).logits - ours).abs().max() <= 1e-5
        theirs.save_pretrained(tmp_path / "theirs")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / "theirs" / name).write_bytes((tmp_path / "ours" / name).read_bytes())
        again = our_model(tmp_path / "theirs")
        assert again.config == model.config
        assert torch.equal(again(tokens), ours)


OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODERN = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
THEIRS = [
    ("GPT2", OLD),
    ("OpenAIGPT", OLD),
    ("Llama", MODERN),
    ("Llama", MODERN | {"rope_parameters": LLAMA_3, "attention_bias": True}),
    ("Llama", MODERN | {"rope_parameters": LINEAR, "mlp_bias": True}),
    ("Mistral", MODERN | {"sliding_window": 20, "head_dim": 16}),
    ("Mistral", MODERN | {"sliding_window": None, "head_dim": 8}),
    ("Qwen2", MODERN),
    ("Qwen3", MODERN | {"head_dim": 16}),
]


def their_random_model(name: str, values: dict[str, object], tokenizer, tied: bool):
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=tokenizer.vocab_size, tie_word_embeddings=tied, **ends, **values
    )
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize(
    ("tied", "dtype", "sharded"),
    [
        (True, torch.float32, False),
        (False, torch.float32, True),
        (True, torch.bfloat16, True),
        (False, torch.float16, False),
    ],
)
@pytest.mark.parametrize(("name", "values"), THEIRS)
def test_transformers_models_run_in_tgen(name, values, tied, dtype, sharded, tokenizer, tmp_path):
    random = their_random_model(name, values, tokenizer, tied).to(dtype)
    random.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "5GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    (tmp_path / "tokenizer.json").write_text(tokenizer.json)
    theirs = load_theirs(tmp_path, dtype=torch.float32)  # stored weights, computed in float32
    ids = torch.randint(
        2, tokenizer.vocab_size, (1, 64), generator=torch.Generator().manual_seed(6)
    )
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (our_model(tmp_path)(ids) - expected).abs().max() <= 1e-5
        model = open_model(tmp_path, EngineOptions(device="cpu", threads=1, dtype="float32"))
        logits = model.engine.extend(ids.tolist(), every_position=True)
        assert np.abs(logits - expected[0].numpy()).max() <= 1e-5
        text = theirs.generate(ids[:, :44], max_new_tokens=20, do_sample=False)[0, 44:]
    sampling = SamplingConfig(temperature=0, max_new_tokens=20)
    ours = [token.id for token in model.tokens(ids[:, :44].tolist(), sampling=sampling)]
    assert ours == text.tolist()


@pytest.mark.parametrize(("name", "values"), THEIRS)
def test_older_and_newer_config_keys_are_equivalent(name, values, tokenizer, tmp_path):
    their_random_model(name, values, tokenizer, True).save_pretrained(tmp_path)
    newer = json.loads((tmp_path / "config.json").read_bytes())
    older = dict(newer)
    if rope := older.pop("rope_parameters", None):
        older["rope_theta"] = rope["rope_theta"]
        kind = {"type": rope["rope_type"]}
        scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")} | kind
        older["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    else:
        spellings = {
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
        }
        older = {spellings.get(key, key): value for key, value in older.items()}
    assert older != newer
    assert from_json(older) == from_json(newer)


def test_own_head_wins_over_a_config_that_ties(family, tokenizer, tmp_path):
    model = make_model(family, vocab_size=tokenizer.vocab_size, tied_embeddings=False)
    model_dir.save(tmp_path, model.config, tokenizer, model.to_arrays())
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(our_model(tmp_path)(tokens), model(tokens))
        assert (load_theirs(tmp_path)(tokens).logits - model(tokens)).abs().max() <= 1e-5
