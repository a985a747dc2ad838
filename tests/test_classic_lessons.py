"""The teaching notebooks that the project grew from, with real training."""

import json

import pytest
import torch

from support.command import tgen
from support.models import make_model
from tgen.config import ModelConfig
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer

ANSWERS = {"what is statquest": "awesome", "statquest is what": "awesome"}
TRAINING = (
    "--family classic --steps 300 --val-fraction 0 --tokenizer bpe --vocab-size 280 "
    "--set d_model=32 --set n_layers=2 --set batch_size=8"
)


@pytest.fixture
def statquest(tmp_path):
    """A classic model that was trained on the questions and answers of the notebook."""
    corpus = tmp_path / "statquest.jsonl"
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in ANSWERS.items()]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tgen("train", corpus, "--out", tmp_path / "model", *TRAINING.split())
    assert result.returncode == 0, result.stderr.decode()
    return tmp_path / "model"


@pytest.fixture(scope="module")
def transformer():
    """A classic model of the notebook's size, untrained."""
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
    return Transformer(config).eval()


@torch.no_grad()
def log_probabilities(model, tokens):
    return model(tokens).log_softmax(dim=-1)


@torch.no_grad()
def keys_and_values(model, word):
    """The KV cache after a word, of which each byte is a token."""
    cache = KVCache(model.config, 1, device=torch.device("cpu"), dtype=torch.float64)
    model(torch.tensor([list(word)]), cache=cache)
    return cache


def test_classic_model_learns_to_answer_and_ends(statquest):
    for prompt, answer in ANSWERS.items():
        result = tgen("generate", "-m", statquest, "-p", prompt, "-t", 0, "--json")
        record = json.loads(result.stdout)
        assert record["text"] == answer
        assert record["finish_reason"] == "stop"  # with an end-of-text token


def test_classic_model_predicts_every_next_token(transformer):
    predictions = log_probabilities(transformer, torch.randint(10_000, (8, 64)))
    assert predictions.shape == (8, 64, 10_000)
    assert torch.allclose(predictions.exp().sum(dim=-1), torch.ones(8, 64), atol=1e-4)


def test_classic_model_does_not_see_later_tokens(transformer):
    tokens = torch.randint(10_000, (8, 64))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 10_000
    before, after = (log_probabilities(transformer, text) for text in (tokens, changed))
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_keys_and_values_of_a_prefix_do_not_change(family):
    model = make_model(family).double()
    hi, him = keys_and_values(model, b"hi"), keys_and_values(model, b"him")
    for layer in range(model.config.n_layers):
        for name in ("keys", "values"):
            short, long = getattr(hi, name)[layer], getattr(him, name)[layer]
            assert torch.allclose(short[:, :, :2], long[:, :, :2], atol=1e-12)
            assert long[:, :, 2].abs().max() > 0  # the third position is new
