"""Validation loss and its standard error against their definitions."""

import sys

import numpy as np
import pytest
import torch

from tgen.config import ModelConfig
from tgen.corpus import TokenDataset, Tokens
from tgen.model.precision import has_bfloat16_units
from tgen.model.transformer import Transformer
from tgen.training.evaluation import evaluate, evaluate_alone, tokens_for_error
from tgen.training.loss import LossModule


def test_bits_per_byte_match_the_definition():
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig.of("qwen3", vocab_size=40, n_layers=1, d_model=16, n_heads=2, context_length=8)
    )
    tokens = np.random.default_rng(0).integers(0, 40, 60).astype(np.uint16)
    store = TokenDataset(
        train=Tokens(tokens[:30]),
        val=Tokens(tokens[30:]),
        val_bytes=100,
        context_length=8,
        batch_size=1,
        seed=0,
    )
    nats = 0.0
    for start in range(29, 59, 8):
        window = torch.tensor(tokens[start : start + 9].astype(np.int64))[None]
        with torch.no_grad():
            log_p = model(window[:, :-1]).double().log_softmax(-1)
        nats -= log_p.gather(-1, window[:, 1:, None]).sum().item()
    loss, bits, *_ = evaluate(LossModule(model), store)
    assert loss == pytest.approx(nats / 30, rel=1e-5)
    assert bits == pytest.approx(nats / np.log(2) / 100, rel=1e-5)
    part = evaluate(LossModule(model), store, max_tokens=8)
    assert evaluate_alone(model, store) == evaluate(LossModule(model), store) != part
    assert evaluate_alone(model, store, max_tokens=8) == part


def test_tokens_for_an_error_grow_with_its_inverse_square():
    parts = [2.0, 2.2, 1.8, 2.0]
    error = np.std(parts, ddof=1) / 2 / 2.0  # of 400 tokens, relative to the mean
    assert tokens_for_error(parts, 400, error) == pytest.approx(400, abs=1)
    assert tokens_for_error(parts, 400, error / 3) == pytest.approx(3600, abs=1)
    assert tokens_for_error(parts[:1], 400, error) == sys.maxsize


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), False),  # GTX 1080
        ((7, 0), False),  # V100
        ((7, 5), False),  # T4
        ((8, 0), True),  # A100
        ((8, 9), True),  # RTX 4090
        ((9, 0), True),  # H100
        ((12, 0), True),
    ],
)
def test_bfloat16_is_used_where_the_gpu_has_units_for_it(capability, expected):
    assert has_bfloat16_units(capability) is expected
