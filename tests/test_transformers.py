"""Every family against transformers on the same directory, and back again."""

import json

import numpy as np
import pytest
import torch

from conftest import TEXT, make_model
from tgen.checkpoint import directory
from tgen.config import RopeScaling
from tgen.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

VARIANTS = [
    ("classic", {}),
    ("gpt2", {}),
    ("gpt2", {"d_ff": 96, "activation": "gelu"}),
    ("llama", {}),
    ("llama", {"tied_embeddings": False, "attention_bias": True, "output_bias": True}),
    (
        "llama",
        {
            "rope_scaling": RopeScaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=16
            )
        },
    ),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 16, "tied_embeddings": False, "rope_theta": 1e6}),
]


def load_theirs(path):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def our_model(path) -> Transformer:
    bundle = directory.load(path)
    return Transformer.from_arrays(bundle.config, bundle.arrays)


@pytest.mark.parametrize(("family", "values"), VARIANTS)
def test_logits_equal_and_survive_the_round_trip(family, values, tokenizer, tmp_path):
    model = make_model(family, vocab_size=tokenizer.vocab_size, **values)
    directory.save(tmp_path / "ours", model.config, tokenizer, model.to_arrays())
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


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "classic"])
def test_a_random_model_of_theirs_loads_with_equal_logits(family, tokenizer, tmp_path):
    small = {"vocab_size": tokenizer.vocab_size, "bos_token_id": 0, "eos_token_id": 0}
    modern = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "head_dim": 8,
    }
    old = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = {
        "gpt2": lambda: transformers.GPT2Config(**small, **old),
        "classic": lambda: transformers.OpenAIGPTConfig(**small, **old),
        "llama": lambda: transformers.LlamaConfig(**small, **modern),
        "qwen3": lambda: transformers.Qwen3Config(**small, **modern),
    }[family]()
    torch.manual_seed(5)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer.json)
    tokens = torch.randint(
        tokenizer.vocab_size, (1, 60), generator=torch.Generator().manual_seed(6)
    )
    with torch.no_grad():
        assert (our_model(tmp_path)(tokens) - theirs(tokens).logits).abs().max() <= 1e-5


def test_weights_stored_in_bfloat16_and_in_shards_load(tokenizer, tmp_path):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    directory.save(tmp_path / "ours", model.config, tokenizer, model.to_arrays())
    theirs = load_theirs(tmp_path / "ours").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    (tmp_path / "shards" / "tokenizer.json").write_text(tokenizer.json)
    bundle = directory.load(tmp_path / "shards")
    assert all(array.dtype == np.uint16 for array in bundle.arrays.values())
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        ours = Transformer.from_arrays(bundle.config, bundle.arrays)(tokens)
        wide = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "shards", dtype=torch.float32
        )
        assert (ours - wide(tokens).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["llama", "classic", "gpt2", "qwen3"])
def test_their_tokenizer_gives_our_ids(model_directory):
    theirs = transformers.AutoTokenizer.from_pretrained(model_directory)
    ours = directory.load(model_directory).tokenizer
    text = TEXT.decode() + "unseen: ñ 🙂‍↔️ \t\r\n  x"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text.encode())
    assert theirs.decode(ours.encode(text.encode())) == text
    generation = json.loads((model_directory / "generation_config.json").read_bytes())
    assert generation["eos_token_id"] == theirs.eos_token_id == 0
