"""The training loop."""

import itertools

import numpy as np
import pytest
import torch

from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.corpus import TokenDataset, Tokens
from tgen.model.transformer import Transformer
from tgen.reports.training import DoneReport, EvalReport, StepReport
from tgen.training.loop import train
from tgen.training.schedule import seconds_left
from tgen.training.state import Progress, TrainState


def test_minutes_end_in_time_and_the_decay_is_stored():
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5  # four times per step: two seconds
        return now

    config = ResolvedTrainConfig(minutes=2, batch_size=2, eval_every=1000, decay_fraction=0.25)
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig.of("qwen3", vocab_size=40, n_layers=1, d_model=16, n_heads=2, context_length=8)
    )
    store = TokenDataset(
        train=Tokens(np.arange(40, dtype=np.uint16)),
        val=Tokens(np.zeros(0, np.uint16)),
        val_bytes=0,
        context_length=8,
        batch_size=2,
        seed=0,
    )
    state = TrainState(model, config)
    steps = [
        r for r in train(model, store, config, state, clock=clock) if isinstance(r, StepReport)
    ]
    assert 114 <= state.progress.seconds <= 126
    assert state.progress.decay_start == pytest.approx(0.75 * len(steps), abs=2)
    assert state.progress.total_steps == len(steps)
    learning_rates = [r.learning_rate for r in steps]
    assert max(learning_rates) == pytest.approx(config.learning_rate)
    assert learning_rates[-1] < 0.1 * config.learning_rate
    assert all(later <= earlier for earlier, later in itertools.pairwise(learning_rates[50:]))


def test_slow_first_step_ends_the_run():
    times = itertools.count(step=45.0)
    config = ResolvedTrainConfig(minutes=2, batch_size=2, eval_every=1000)
    model = Transformer(
        ModelConfig.of("qwen3", vocab_size=40, n_layers=1, d_model=16, n_heads=2, context_length=8)
    )
    tokens = Tokens(np.arange(40, dtype=np.uint16))
    store = TokenDataset(
        train=tokens, val=tokens, val_bytes=40, context_length=8, batch_size=2, seed=0
    )
    state = TrainState(model, config)
    reports = list(train(model, store, config, state, clock=lambda: next(times)))
    kinds = [type(report) for report in reports]
    assert kinds == [StepReport, EvalReport, DoneReport]


def test_slower_steps_than_planned_leave_more_time_for_the_end():
    config = ResolvedTrainConfig(minutes=10, batch_size=2)
    progress = Progress(seconds=100.0, steps_taken=10, closing_seconds=20.0)
    as_planned = seconds_left(progress, config)
    progress.planned_step_seconds = 5.0
    assert seconds_left(progress, config) == pytest.approx(as_planned - 20)
    progress.planned_step_seconds = 20.0
    assert seconds_left(progress, config) == as_planned


def test_last_evaluation_is_repeated_with_a_better_logit_scale():
    shape = {"vocab_size": 40, "n_layers": 1, "d_model": 16, "n_heads": 2, "context_length": 8}
    tokens = Tokens(np.random.default_rng(0).integers(40, size=400, dtype=np.uint16))
    store = TokenDataset(
        train=tokens, val=tokens, val_bytes=400, context_length=8, batch_size=2, seed=0
    )
    reports = []
    for scaling in (False, True):
        config = ResolvedTrainConfig(
            steps=2, batch_size=2, eval_every=1000, temperature_scaling=scaling
        )
        torch.manual_seed(0)
        model = Transformer(ModelConfig.of("qwen3", **shape))
        with torch.no_grad():
            model.output_weight.normal_(std=0.5)  # overconfident
        state = TrainState(model, config)
        (report,) = (r for r in train(model, store, config, state) if isinstance(r, EvalReport))
        assert report.logit_scale == state.progress.logit_scale
        reports.append(report)
    unscaled, scaled = reports
    assert unscaled.logit_scale == 1 > scaled.logit_scale
    assert scaled.loss < unscaled.loss - 0.1
