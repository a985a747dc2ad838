"""The training loop."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.corpus import Batch, TokenDataset, Tokens
from tgen.model.transformer import Transformer
from tgen.reports.training import DoneReport, EvalReport, StepReport
from tgen.training import loop
from tgen.training.loop import train
from tgen.training.loss import to_device
from tgen.training.machine_speed import random_dataset
from tgen.training.schedule import seconds_left
from tgen.training.state import Progress, TrainState, new_state

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 40, "n_layers": 1, "d_model": 16, "n_heads": 2, "context_length": 8}


def small_model() -> Transformer:
    return Transformer(ModelConfig.of("qwen3", **SHAPE))


def dataset(tokens: Tokens, *, val_bytes: int) -> TokenDataset:
    """Return a text that is trained on, and evaluated on if it has bytes."""
    val = tokens if val_bytes else Tokens(np.zeros(0, np.uint16))
    return TokenDataset(
        train=tokens, val=val, val_bytes=val_bytes, context_length=8, batch_size=2, seed=0
    )


COUNT = Tokens(np.arange(40, dtype=np.uint16))


def test_minutes_end_in_time_and_the_decay_is_stored():
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5  # four times per step: two seconds
        return now

    config = ResolvedTrainConfig(minutes=2, batch_size=2, eval_every=1000, decay_fraction=0.25)
    torch.manual_seed(0)
    model = small_model()
    store = dataset(COUNT, val_bytes=0)
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
    model = small_model()
    store = dataset(COUNT, val_bytes=40)
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
    tokens = Tokens(np.random.default_rng(0).integers(40, size=400, dtype=np.uint16))
    store = dataset(tokens, val_bytes=400)
    reports = []
    for scaling in (False, True):
        config = ResolvedTrainConfig(
            steps=2, batch_size=2, eval_every=1000, temperature_scaling=scaling
        )
        torch.manual_seed(0)
        model = small_model()
        with torch.no_grad():
            model.output_weight.normal_(std=0.5)  # overconfident
        state = TrainState(model, config)
        (report,) = (r for r in train(model, store, config, state) if isinstance(r, EvalReport))
        assert report.logit_scale == state.progress.logit_scale
        reports.append(report)
    unscaled, scaled = reports
    assert unscaled.logit_scale == 1 > scaled.logit_scale
    assert scaled.loss < unscaled.loss - 0.1


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let the loop take the CPU for a GPU."""
    monkeypatch.setattr(loop, "_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(loop, "to_device", lambda windows, _: to_device(windows, CPU))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(("seconds", "most"), [(0.01, 10), (0.3, 3), (5.0, 1)])
def test_no_look_at_a_gpu_is_much_later_than_a_second(monkeypatch, seconds, most):
    now, step = 0.0, loop._step

    def slow_step(*given):
        nonlocal now
        now += seconds
        return step(*given)

    monkeypatch.setattr(loop, "_step", slow_step)
    config = ResolvedTrainConfig(steps=40, batch_size=2, eval_every=1000)
    model = small_model()
    store = dataset(COUNT, val_bytes=0)
    state = TrainState(model, config)
    state.progress.total_steps = 40
    reports = train(model, store, config, state, clock=lambda: now)
    looks = [0, *(r.step for r in reports if isinstance(r, StepReport))]
    assert max(later - earlier for earlier, later in itertools.pairwise(looks)) == most


@pytest.mark.usefixtures("on_a_gpu")
def test_dropout_on_a_gpu_repeats_its_masks_with_activation_checkpointing():
    gradients = []
    for checkpointing in (False, True):
        config = ResolvedTrainConfig(
            batch_size=4, dropout=0.4, activation_checkpointing=checkpointing
        )
        state = new_state(ModelConfig.of("qwen3", **SHAPE | {"n_layers": 2}), config, CPU)
        state.loss_module.train()
        loop._seed_dropout(state.model, config, 0, range(4))
        batch = to_device(random_dataset(state.model.config, config).batch(0), CPU)
        state.step_loss(batch).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_activation_checkpointing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    losses = []
    for compiled in (False, True):
        config = ResolvedTrainConfig(batch_size=4, activation_checkpointing=True, compile=compiled)
        state = new_state(ModelConfig.of("qwen3", **SHAPE | {"n_layers": 2}), config, CPU)
        batch = to_device(random_dataset(state.model.config, config).batch(0), CPU)
        loss = state.step_loss(batch)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_only_pinned_memory_is_copied_without_waiting(monkeypatch):
    waits = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, _, non_blocking: waits.append(not non_blocking) or self
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for kind in ("cpu", "mps", "cuda"):
        to_device(Batch(np.zeros((1, 2), np.int64), None, None), torch.device(kind))
    assert waits == [True, True, False]
