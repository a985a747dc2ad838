"""The measured speed is the number of operations of a pass divided by its time; a step's time is
the median of several."""

import itertools

import pytest
import torch

from tgen.config import SIZES, ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.model.transformer import Transformer
from tgen.planning.costs import MeasuredStep
from tgen.training import machine_speed
from tgen.training.machine_speed import RandomRun
from tgen.training.optimizers import Muon

CPU = torch.device("cpu")


@pytest.mark.parametrize(("seconds", "windows"), [(0.0, 2), (0.5, 8)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_speed_is_six_operations_per_parameter_and_token(monkeypatch, precision, seconds, windows):
    clock = itertools.count(step=0.5)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    config = ModelConfig.of("qwen3", **SIZES["tiny"], vocab_size=1024)
    n_parameters = sum(p.numel() for p in Transformer(config).parameters())
    operations = 6 * n_parameters * windows * 128
    speed = machine_speed.measure_speed(torch.device("cpu"), precision, seconds=seconds)
    assert speed == operations / 0.5


def test_time_of_a_step_is_the_median_without_the_first(monkeypatch):
    steps: list[int] = []
    now = 0.0

    def advance(run: RandomRun, n: int) -> int:  # noqa: ARG001
        nonlocal now
        now += [100.0, 1.0, 3.0, 2.0, 9.0][len(steps)]
        steps.append(n)
        return n

    def muon_step(muon: Muon) -> None:  # noqa: ARG001
        nonlocal now
        now += 0.5

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(RandomRun, "advance", advance)
    monkeypatch.setattr(Muon, "step", muon_step)
    model = ModelConfig.of("qwen3", **SIZES["nano"], vocab_size=300)
    measured = machine_speed.measure_step(model, ResolvedTrainConfig(batch_size=3), CPU, seconds=0)
    assert measured == MeasuredStep(3 * model.context_length, 2.0, 0.5)
    assert len(steps) == machine_speed.MIN_STEPS
    adamw = ResolvedTrainConfig(optimizer="adamw")
    steps.clear()
    assert machine_speed.measure_step(model, adamw, CPU, seconds=0).muon_seconds == 0
    assert measured.seconds_of(6 * model.context_length) == 3.5
    assert measured.seconds_of(3 * model.context_length, muon=False) == 1.5
