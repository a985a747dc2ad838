"""The measured speed is the number of operations of a pass divided by its time."""

import itertools

import pytest
import torch

from tgen.config import SIZES, ModelConfig
from tgen.model.transformer import Transformer
from tgen.training import calibrate


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_speed_is_six_operations_per_parameter_and_token(monkeypatch, precision):
    clock = itertools.count(step=0.5)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    config = ModelConfig.of("qwen3", **SIZES["tiny"], vocab_size=1024)
    n_parameters = sum(p.numel() for p in Transformer(config).parameters())
    operations = 6 * n_parameters * 8 * config.context_length
    speed = calibrate.measure_speed(torch.device("cpu"), precision, seconds=0)
    assert speed == operations / 0.5
