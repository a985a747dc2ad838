"""The teaching notebooks that the project grew from, with real training."""

import json

import torch

from support.command import tgen
from support.models import make_model
from tgen.config import ModelConfig
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer


def test_classic_model_learns_to_answer_and_ends(tmp_path):
    rows = [("what is statquest", "awesome"), ("statquest is what", "awesome")]
    corpus = tmp_path / "statquest.jsonl"
    corpus.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    result = tgen(
        "train",
        corpus,
        "--family",
        "classic",
        "--steps",
        300,
        "--val-fraction",
        0,
        "--out",
        tmp_path / "model",
        "--tokenizer",
        "bpe",
        "--vocab-size",
        280,
        "--set",
        "d_model=32",
        "--set",
        "n_layers=2",
        "--set",
        "batch_size=8",
    )
    assert result.returncode == 0, result.stderr.decode()
    for prompt, answer in rows:
        result = tgen("generate", "-m", tmp_path / "model", "-p", prompt, "-t", 0, "--json")
        record = json.loads(result.stdout)
        assert record["text"] == answer
        assert record["finish_reason"] == "stop"  # with an end-of-text token


def test_classic_model_of_the_notebook_s_size_is_causal():
    torch.manual_seed(0)
    config = ModelConfig.of(
        "classic",
        vocab_size=10_000,
        d_model=512,
        n_layers=6,
        n_heads=8,
        d_ff=2048,
        context_length=64,
    )
    model = Transformer(config).eval()
    tokens = torch.randint(10_000, (8, 64))
    with torch.no_grad():
        log_probabilities = model(tokens).log_softmax(dim=-1)
        assert log_probabilities.shape == (8, 64, 10_000)
        assert torch.allclose(log_probabilities.exp().sum(-1), torch.ones(8, 64), atol=1e-4)
        changed = tokens.clone()
        changed[:, 40] = (changed[:, 40] + 1) % 10_000
        again = model(changed).log_softmax(dim=-1)
    assert torch.equal(log_probabilities[:, :40], again[:, :40])
    assert not torch.allclose(log_probabilities[:, 40:], again[:, 40:])


def test_keys_and_values_of_a_prefix_do_not_change(family):
    model = make_model(family).double()

    def keys_and_values(word: bytes) -> KVCache:
        cache = KVCache(model.config, 1, device=torch.device("cpu"), dtype=torch.float64)
        with torch.no_grad():
            model(torch.tensor([list(word)]), cache=cache)
        return cache

    hi, him = keys_and_values(b"hi"), keys_and_values(b"him")
    for layer in range(model.config.n_layers):
        for name in ("keys", "values"):
            short, long = getattr(hi, name)[layer], getattr(him, name)[layer]
            assert torch.allclose(short[:, :, :2], long[:, :, :2], atol=1e-12)
            assert long[:, :, 2].abs().max() > 0  # the third position is new
