"""The timed steps are those of training, and their FLOPs equal a hand count."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tgen.benchmark.training_step import measure_training_step
from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.errors import UsageError
from tgen.model.transformer import Transformer
from tgen.planning.costs import flops_per_token
from tgen.reports.benchmark import TrainingStepReport, TrialReport
from tgen.training.machine_speed import RandomRun

SHAPE = dict(vocab_size=40, n_layers=2, d_model=16, n_heads=2, context_length=8)
CPU = torch.device("cpu")


def test_flops_equal_a_hand_count():
    # Two layers of width 16: q and o 16 x 16, k and v 16 x 8, three matrices 16 x 64; head 40 x 16.
    config = ModelConfig.of("llama", **SHAPE, n_kv_heads=1)
    weights = 2 * (2 * 256 + 2 * 128 + 3 * 16 * 64) + 640
    # A token attends to 4 of 8 keys on average: 16 products for the score, 16 for the value;
    # 2 FLOPs each, 3 times per step.
    attention = 2 * 4 * (16 + 16) * 2 * 3
    assert flops_per_token(config) == 6 * weights + attention
    assert flops_per_token(config, frozen=True) == 4 * weights + attention
    doubled = ModelConfig.of("llama", **SHAPE | {"context_length": 16}, n_kv_heads=1)
    assert flops_per_token(doubled) == 6 * weights + 2 * attention
    wide = ModelConfig.of("llama", **SHAPE, n_kv_heads=1, head_dim=16)  # independent of d_model
    assert flops_per_token(wide) == 6 * (weights + 2 * (2 * 256 + 2 * 128)) + 2 * attention
    # A window of 4 in one of two layers: 3 of 8 keys on average, as 4 of 8 without it.
    shape = SHAPE | {"sliding_layers": (False, True)}
    gemma = ModelConfig.of("gemma3", **shape)
    local = ModelConfig.of("gemma3", **shape, sliding_window=4)
    assert flops_per_token(gemma) - flops_per_token(local) == (4 - 3) * (16 + 16) * 2 * 3
    assert flops_per_token(ModelConfig.of("gemma3", **shape, sliding_window=8)) == (
        flops_per_token(gemma)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_flops_equal_those_counted_by_torch(family, tied):
    config = ModelConfig.of(family, **SHAPE, tied_embeddings=tied)
    model = Transformer(config)
    tokens = torch.arange(3 * 9).view(3, 9)
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    counted = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    products = sum(n for name, n in counted.items() if "attention" not in name)
    attention = 12 * 2 * 16 * 8 // 2
    assert products == 3 * 8 * (flops_per_token(config) - attention)


def test_report_summarizes_the_blocks():
    model, config = ModelConfig.of("qwen3", **SHAPE), ResolvedTrainConfig(batch_size=3)
    *rounds, report = measure_training_step(
        model, config=config, steps=2, trials=3, device="cpu", peak_flops=5e9
    )
    assert rounds == [TrialReport(trial=i, trials=3) for i in range(4)]
    assert isinstance(report, TrainingStepReport)
    assert (report.device, report.steps, report.tokens_per_step) == ("cpu", 6, 24)
    assert len(report.seconds.seconds) == 3
    assert report.tokens_per_second == pytest.approx(24 / report.seconds.median)
    assert report.flops_per_token == flops_per_token(model)
    needed = report.flops_per_token * 24 / report.seconds.median
    assert report.flops_per_second == pytest.approx(needed)
    assert report.utilization == pytest.approx(needed / 5e9)
    *_, report = measure_training_step(model, steps=1, trials=1, device="cpu")
    assert report.tokens_per_step == 16 * 8
    assert report.utilization is None


def test_block_time_is_divided_by_the_steps_taken(monkeypatch):
    """On a GPU, losses arrive every ten steps."""
    monkeypatch.setattr(RandomRun, "advance", lambda self, n: 10 * -(-n // 10))  # noqa: ARG005
    clock = itertools.count(step=20.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    *_, report = measure_training_step(
        ModelConfig.of("qwen3", **SHAPE), steps=3, trials=2, device="cpu"
    )
    assert report.steps == 20
    assert report.seconds.seconds == [2.0, 2.0]


def test_invalid_arguments_are_errors():
    model = ModelConfig.of("qwen3", **SHAPE)
    with pytest.raises(UsageError):
        list(measure_training_step(model, device="none"))
    vast = ModelConfig.of("qwen3", **SHAPE | {"context_length": 1 << 20})
    config = ResolvedTrainConfig(batch_size=1 << 20)
    with pytest.raises(UsageError, match="GB"):
        list(measure_training_step(vast, config=config, device="cpu"))
