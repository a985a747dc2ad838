"""Validation loss and its standard error against their definitions."""

import math

import numpy as np
import pytest
import torch

from tgen.config import ModelConfig
from tgen.corpus import TokenDataset
from tgen.model.product_precision import has_bfloat16_units
from tgen.model.transformer import Transformer
from tgen.training.evaluation import (
    LossModule,
    bits_per_byte_error,
    evaluate,
    evaluate_alone,
)


def test_bits_per_byte_match_the_definition():
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig.of("qwen3", vocab_size=40, n_layers=1, d_model=16, n_heads=2, context_length=8)
    )
    tokens = np.random.default_rng(0).integers(0, 40, 60).astype(np.uint16)
    store = TokenDataset(
        train=tokens[:30],
        val=tokens[30:],
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


def test_equal_windows_have_the_usual_standard_error():
    bits = np.random.default_rng(1).normal(2.0, 0.5, 50)  # per byte, of windows of 100 bytes
    usual = bits.std(ddof=1) / math.sqrt(50)
    error = bits_per_byte_error(bits * 100 * math.log(2), [100] * 50)
    assert error == pytest.approx(usual, rel=1e-12)


def test_window_sizes_alone_cause_no_error():
    sizes = np.array([10, 200, 35])
    assert bits_per_byte_error(sizes * 1.7, sizes) == pytest.approx(0, abs=1e-12)
    assert bits_per_byte_error([3.0], [2]) == math.inf
    assert bits_per_byte_error([], []) == math.inf


def test_standard_error_matches_the_scatter_of_samples():
    random = np.random.default_rng(2)
    n_bytes = random.integers(50, 150, (2000, 40))
    nats = n_bytes * 1.4 + random.normal(0, 1, n_bytes.shape) * n_bytes * 0.3
    ratios = nats.sum(1) / math.log(2) / n_bytes.sum(1)
    errors = [bits_per_byte_error(*window) for window in zip(nats, n_bytes, strict=True)]
    assert np.mean(errors) == pytest.approx(ratios.std(), rel=0.05)


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
