"""Divergence: steps are skipped, rolled back, given up, and never saved."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from support.runs import plan_of, request, resume
from tgen import runs
from tgen.checkpoint import model_dir
from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.corpus import TokenDataset, Tokens
from tgen.errors import TrainingError
from tgen.experiments.run_summary import summarize_run
from tgen.model.transformer import Transformer
from tgen.reports.training import DoneReport, RollbackReport, StepReport
from tgen.runs import log as run_log
from tgen.training import loop, optimizers
from tgen.training import loss as loss_module
from tgen.training.evaluation import Evaluation
from tgen.training.state import TrainState


def poison(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> None:
    """Make the n-th loss, and so its gradient, NaN if `bad(n)`."""
    original, count = loss_module.loss_sum, iter(range(10**6))

    def loss(*arguments):
        return original(*arguments) * (float("nan") if bad(next(count)) else 1)

    monkeypatch.setattr(loss_module, "loss_sum", loss)


def ignore_found_inf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU's fused AdamW ignore `found_inf`, as that of MPS does."""
    from torch.optim.adamw import adamw

    monkeypatch.setattr(optimizers, "_IGNORE_FOUND_INF", {"cpu"})
    monkeypatch.setattr(
        optimizers,
        "adamw",
        lambda *args, **options: adamw(*args, **options | {"found_inf": None}),
    )


@pytest.mark.parametrize("kernel_checks", [True, False])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_step_that_is_not_finite_changes_nothing(monkeypatch, optimizer, kernel_checks):
    poison(monkeypatch, lambda n: n == 2)
    if not kernel_checks:
        ignore_found_inf(monkeypatch)
    config = ResolvedTrainConfig(steps=5, batch_size=2, eval_every=100, optimizer=optimizer)
    torch.manual_seed(0)
    state = TrainState(
        Transformer(
            ModelConfig.of(
                "qwen3", vocab_size=40, n_layers=1, d_model=16, n_heads=2, context_length=8
            )
        ),
        config,
    )
    tokens = np.arange(40, dtype=np.uint16)
    store = TokenDataset(
        train=Tokens(tokens),
        val=Tokens(tokens[:0]),
        val_bytes=0,
        context_length=8,
        batch_size=2,
        seed=0,
    )
    seen, losses = [], []
    for report in loop.train(state.model, store, config, state):
        if isinstance(report, StepReport):
            losses.append(report.loss)
            seen.append({name: array.copy() for name, array in state.own_arrays().items()})
    assert [loss is None for loss in losses] == [False, False, True, False, False]
    for name, array in seen[1].items():
        assert np.array_equal(array, seen[2][name]), name
        assert np.isfinite(seen[4][name]).all(), name
    assert any(not np.array_equal(seen[2][name], seen[3][name]) for name in seen[2])


def test_three_skipped_steps_restore_the_last_state_at_half_the_learning_rate(
    tmp_path, monkeypatch
):
    poison(monkeypatch, lambda n: 7 <= n < 10)
    reports = list(runs.start(request(tmp_path)))
    (back,) = [r for r in reports if isinstance(r, RollbackReport)]
    assert (back.step, back.from_step, back.learning_rate_scale) == (5, 10, 0.5)
    assert isinstance(reports[-1], DoneReport)
    assert reports[-1].step == 14
    rates = {r.step: r.learning_rate for r in reports if isinstance(r, StepReport)}
    assert rates[8] == pytest.approx(0.5 * plan_of(reports).learning_rate)


def test_early_stopping_keeps_the_halved_learning_rate(tmp_path, monkeypatch):
    poison(monkeypatch, lambda n: 7 <= n < 10)
    worse = iter(range(3, 100))
    scores = (Evaluation(1.0, float(bits), None, []) for bits in worse)
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: next(scores))
    reports = list(
        runs.start(request(tmp_path, overrides={"patience": "1", "decay_fraction": "0.1"}))
    )
    scales = [r.learning_rate_scale for r in reports if isinstance(r, RollbackReport)]
    assert scales[0] == 0.5
    assert len(scales) > 1
    assert set(scales) == {0.5}


def test_repeated_divergence_ends_the_run_and_keeps_the_last_good_model(tmp_path, monkeypatch):
    poison(monkeypatch, lambda n: n >= 7)
    with pytest.raises(TrainingError, match="after 3 rollbacks"):
        list(runs.start(request(tmp_path)))
    log = run_log.read(tmp_path / "model")
    scales = [r["learning_rate_scale"] for r in log if r["kind"] == "RollbackReport"]
    assert scales == [0.5, 0.25, 0.125]
    assert summarize_run(tmp_path / "model", "a").state == "diverged"
    bundle = model_dir.load(tmp_path / "model")  # of step 5
    assert all(np.isfinite(array).all() for array in bundle.arrays.values())


def test_divergences_count_across_sessions(tmp_path, monkeypatch):
    poison(monkeypatch, lambda n: n >= 0)
    n_rollbacks = 0
    session = runs.start(request(tmp_path))
    while n_rollbacks < 2:
        n_rollbacks += isinstance(next(session), RollbackReport)
    session.close()  # as if killed
    with pytest.raises(TrainingError, match="after 3 rollbacks"):
        list(resume(tmp_path / "model"))
    log = run_log.read(tmp_path / "model")
    assert [r["learning_rate_scale"] for r in log if r["kind"] == "RollbackReport"] == [
        0.5,
        0.25,
        0.125,
    ]


def test_infinite_weight_is_not_saved(tmp_path):
    wild = {"learning_rate": "1e38", "optimizer": "adamw", "grad_clip": "1e30", "warmup_steps": "0"}
    with pytest.raises(TrainingError):
        list(runs.start(request(tmp_path, overrides=wild)))
    assert not (tmp_path / "model" / "config.json").exists()
