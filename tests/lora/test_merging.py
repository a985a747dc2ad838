"""Adapters of PEFT with more than pairs: the logits of PEFT's own model."""

import json
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tgen.checkpoint import export, model_dir
from tgen.config import EngineOptions
from tgen.engine.open_engine import open_engine
from tgen.errors import ModelError
from tgen.lora import adapter as adapters
from tgen.lora import model_with_adapter

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NEOX = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FAN = {"fan_in_fan_out": True, "target_modules": ["c_attn", "c_fc"]}
Q = {"target_modules": ["q_proj"]}
BOTH = ["embed_tokens", "lm_head"]
CASES = [
    *(("llama", tied, Q | {"modules_to_save": BOTH}) for tied in (False, True)),
    *(("llama", tied, Q | {"modules_to_save": ["embed_tokens"]}) for tied in (False, True)),
    *(("llama", tied, Q | {"modules_to_save": ["lm_head"]}) for tied in (False, True)),
    ("llama", False, Q | {"modules_to_save": ["norm", "input_layernorm", "up_proj"]}),
    *(("llama", tied, {"target_modules": ["embed_tokens", "q_proj"]}) for tied in (False, True)),
    *(("llama", tied, {"target_modules": ["lm_head", "v_proj"]}) for tied in (False, True)),
    *(("llama", tied, Q | {"trainable_token_indices": [3, 9]}) for tied in (False, True)),
    ("llama", False, Q | {"trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [7]}}),
    ("llama", False, {"target_modules": "all-linear", "use_dora": True, "use_rslora": True}),
    ("llama", False, {"target_modules": [*BOTH, "q_proj"], "use_dora": True}),
    ("gpt2", True, FAN | {"use_dora": True}),
    ("gpt2", True, FAN | {"bias": "all"}),
    ("gpt2", True, FAN | {"lora_bias": True}),
    ("gpt_neox", False, {"target_modules": ["query_key_value"], "use_dora": True}),
]


def make_base(path, family, tied, tokenizer):
    torch.manual_seed(0)
    shape = {"llama": LLAMA, "gpt2": GPT2, "gpt_neox": NEOX}[family]
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    config = transformers.AutoConfig.for_model(
        family,
        **shape | special,
        vocab_size=tokenizer.vocab_size,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer.json)
    return model.eval()


def make_adapter(tmp_path, family, tied, tokenizer, settings):
    """Return PEFT's model with an adapter that was saved to a directory."""
    base = make_base(tmp_path / "base", family, tied, tokenizer)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / "adapter")
    return model.eval()


def compute_logits(bundle, ids):
    options = EngineOptions(device="cpu", threads=1, dtype="float32")
    return open_engine(bundle, options).extend([ids])[0]


@pytest.mark.parametrize(("family", "tied", "settings"), CASES)
def test_merged_logits_are_those_of_peft(family, tied, settings, tokenizer, tmp_path):
    theirs = make_adapter(tmp_path, family, tied, tokenizer, settings)
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, 30).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([[*ids, 3, 5, 7, 9]])).logits[0, -1].numpy()
    bundle = model_with_adapter.load(tmp_path / "base", adapter=tmp_path / "adapter")
    export.export_transformers(
        bundle, tmp_path / "out", stored="f32", max_shard_bytes=1 << 30, progress=lambda _: None
    )
    for loaded in (bundle, model_dir.load(tmp_path / "out")):
        actual = compute_logits(loaded, [*ids, 3, 5, 7, 9])
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_resized_vocabulary_comes_with_its_tokenizer(tokenizer, tmp_path):
    make_adapter(tmp_path, "llama", False, tokenizer, Q | {"modules_to_save": BOTH})
    path, n = tmp_path / "adapter", tokenizer.vocab_size
    tensors = load_file(path / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if tensor.shape[0] == n:
            tensors[name] = torch.cat([tensor, tensor[:1]])
    save_file(tensors, path / "adapter_model.safetensors")
    content = json.loads(tokenizer.json)
    content["added_tokens"].append({**content["added_tokens"][-1], "id": n, "content": "<|new|>"})
    (path / "tokenizer.json").write_text(json.dumps(content))
    bundle = model_with_adapter.load(tmp_path / "base", adapter=path)
    assert bundle.config.vocab_size == n + 1
    assert bundle.tokenizer.added_tokens["<|new|>"] == n
    assert np.array_equal(bundle.arrays["lm_head.weight"][-1], bundle.arrays["lm_head.weight"][0])
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="embedding and LM head have different sizes"):
        model_with_adapter.load(tmp_path / "base", adapter=path)


def test_adapters_in_pickle_files_are_read(tokenizer, tmp_path):
    make_adapter(tmp_path, "llama", False, tokenizer, Q)
    path = tmp_path / "adapter"
    expected = model_with_adapter.load(tmp_path / "base", adapter=path)
    tensors = load_file(path / "adapter_model.safetensors")
    (path / "adapter_model.safetensors").unlink()
    torch.save(tensors, path / "adapter_model.bin")
    bundle = model_with_adapter.load(tmp_path / "base", adapter=path)
    assert all(np.array_equal(bundle.arrays[n], a) for n, a in expected.arrays.items())
    assert adapters.describe(path)[1] == 4
    assert model_dir.digest(bundle)
    tensors.pop(next(name for name in tensors if "lora_A" in name))
    torch.save(tensors, path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin: .* has no lora_A"):
        model_with_adapter.load(tmp_path / "base", adapter=path)


@pytest.mark.parametrize(
    ("settings", "name", "shape", "reason"),
    [
        (Q | {"lora_bias": True}, None, None, r"the model has no .*q_proj.bias"),
        (Q, "model.layers.9.mlp.up_proj.weight", (4, 4), "the model has no model.layers.9"),
        (Q, "model.norm.weight", (31,), r"norm.weight of shape \[31\] \(expected \[32\]\)"),
        (Q, "lm_head.lora_A.weight", (4, 32), "lm_head has only one matrix of a pair"),
        (Q | {"trainable_token_indices": [3]},
         "model.embed_tokens.token_adapter.trainable_tokens_delta", (2, 32), "indices does not"),
        (Q | {"use_dora": True}, "model.layers.0.self_attn.q_proj.lora_magnitude_vector", (7,),
         "DoRA vector does not fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(settings, name, shape, reason, tokenizer, tmp_path):
    make_adapter(tmp_path, "llama", False, tokenizer, settings)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    if name is not None:
        save_file(load_file(file) | {f"base_model.model.{name}": torch.ones(shape)}, file)
    with pytest.raises(ModelError, match=reason):
        model_with_adapter.load(tmp_path / "base", adapter=tmp_path / "adapter")


def test_such_an_adapter_cannot_be_trained_further(tokenizer, tmp_path, run_here):
    make_adapter(tmp_path, "llama", False, tokenizer, Q | {"use_dora": True})
    (tmp_path / "corpus.txt").write_text("What is this? " * 200)
    options = ("--adapter", tmp_path / "adapter", "--from", tmp_path / "base", "--dry-run")
    result = run_here("train", tmp_path / "corpus.txt", *options)
    assert result.returncode == 2
    assert b"has DoRA, which cannot be trained further" in result.stderr
    assert b"tgen export" in result.stderr
