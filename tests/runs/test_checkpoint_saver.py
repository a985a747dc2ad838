"""Failing saves: the best weights are never lost, and reports match what is on disk."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import request
from tgen import runs
from tgen.checkpoint import model_dir, model_files
from tgen.config.training import TrainConfig
from tgen.errors import TrainingError
from tgen.reports.training import (
    DoneReport,
    EvalReport,
    RollbackReport,
    RunReport,
    SavingReport,
)
from tgen.runs import checkpoint_saver, trainer
from tgen.runs import saved_state as run_state
from tgen.storage import files
from tgen.training import loop
from tgen.training.evaluation import evaluate as evaluate_model

BEST = 4


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(checkpoint_saver, "_MAX_RETRY_SECONDS", 0.0)  # retry at every step
    monkeypatch.setattr(trainer, "_FINAL_RETRY_SECONDS", (0.0,))


def train(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str = "model",
    *,
    refuses: Callable[[int], bool] = lambda _: False,
    also_weights: bool = False,
    reason: int = errno.ENOSPC,
    meanwhile: Callable[[RunReport], None] = lambda _: None,
) -> list[RunReport]:
    """Train with the best evaluation at step 4 and a rollback at step 8; some saves fail."""
    step, n_evaluations = [0], [0]
    real, save, save_weights = evaluate_model, run_state.save_state, model_dir.save
    real_step = loop._step

    def evaluate(*arguments, **named):
        n_evaluations[0] += 1
        bits = 5.0 + (0 if n_evaluations[0] == BEST // 2 else n_evaluations[0])
        return real(*arguments, **named)._replace(bits_per_byte=bits, parts=[])

    def count_step(model, batches, config, state):
        step[0] = state.progress.step + 1
        return real_step(model, batches, config, state)

    def save_or_fail(*arguments, **named):
        if refuses(step[0]):
            raise OSError(reason, os.strerror(reason))
        return save(*arguments, **named)

    def save_weights_or_fail(*arguments, **named):
        if also_weights and refuses(step[0]):
            raise OSError(reason, os.strerror(reason))
        return save_weights(*arguments, **named)

    settings = {"patience": "2", "eval_every": "2", "decay_fraction": "0.1"}
    run_request = request(folder, name, train=TrainConfig(steps=20), overrides=settings)
    reports = []
    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", evaluate)
        patch.setattr(loop, "_step", count_step)
        patch.setattr(run_state, "save_state", save_or_fail)
        patch.setattr(model_dir, "save", save_weights_or_fail)
        for report in runs.start(run_request):
            reports.append(report)
            meanwhile(report)
    return reports


@pytest.mark.parametrize(
    ("refused", "also_weights", "back_to"),
    [
        ([4], False, 5),
        ([4, 5, 6], True, 7),
        ([4, 5, 6, 7, 8], False, 8),
        ([4, 5, 6, 7, 8], True, 8),
    ],
)
def test_best_weights_survive_a_failed_save(tmp_path, monkeypatch, refused, also_weights, back_to):
    best = {}

    def note(report: RunReport) -> None:
        if getattr(report, "best", False):
            best[report.step] = (tmp_path / "well" / model_files.WEIGHTS).read_bytes()

    reports = train(tmp_path, monkeypatch, "well", meanwhile=note)
    assert [r.step for r in reports if isinstance(r, RollbackReport)] == [BEST]
    reports = train(
        tmp_path, monkeypatch, refuses=lambda step: step in refused, also_weights=also_weights
    )
    (back,) = [r for r in reports if isinstance(r, RollbackReport)]
    assert (back.step, back.from_step) == (back_to, 8)
    assert ("could be saved" in back.reason) == (back_to == 8)
    done = reports[-1]
    assert isinstance(done, DoneReport)
    assert (done.best_step, done.best_bits_per_byte) == (BEST, 5.0)
    assert (tmp_path / "model" / model_files.WEIGHTS).read_bytes() == best[BEST]


def test_damaged_best_state_is_reported_and_the_next_restored(tmp_path, monkeypatch):
    def damage(report: RunReport) -> None:
        if getattr(report, "bits_per_byte", 0) and report.step == 8:
            (tmp_path / "model/training/state-00000004/state.safetensors").write_bytes(b"")

    reports = train(tmp_path, monkeypatch, meanwhile=damage)
    (back,) = [r for r in reports if isinstance(r, RollbackReport)]
    assert back.step == 6
    assert "renamed to damaged-state-00000004" in back.reason


def test_discarded_states_are_removed_with_the_next_save(tmp_path, monkeypatch):
    reports = train(tmp_path, monkeypatch, "well")
    remove = files.remove
    refused = []

    def stays(path: Path) -> None:
        if path.name == "state-00000008" and not refused:
            refused.append(path)
            raise OSError(errno.EIO, "Input/output error")
        remove(path)

    monkeypatch.setattr(files, "remove", stays)
    again = train(tmp_path, monkeypatch)
    assert refused
    assert [type(r) for r in again] == [type(r) for r in reports]
    names = [
        sorted(p.name for p in (tmp_path / name / "training").glob("state-*"))
        for name in ("well", "model")
    ]
    assert names[0] == names[1]


def test_failure_to_save_rollback_counters_is_ignored(tmp_path, monkeypatch):
    def unreadable(*_: object) -> None:
        raise TrainingError("the manifest cannot be opened")

    def after_the_start(report: RunReport) -> None:
        if getattr(report, "step", 0) == 8:
            monkeypatch.setattr(run_state, "save_progress", unreadable)

    reports = train(tmp_path, monkeypatch, meanwhile=after_the_start)
    assert isinstance(reports[-1], DoneReport)


def test_saver_retries_after_a_thousand_failures(tmp_path, monkeypatch):
    begin = checkpoint_saver.CheckpointSaver.__init__

    def failed_often(self, *arguments, **named):
        begin(self, *arguments, **named)
        self._n_failures = 1_100

    monkeypatch.setattr(checkpoint_saver.CheckpointSaver, "__init__", failed_often)
    reports = train(tmp_path, monkeypatch, refuses=lambda step: step in (1, 2))
    saved = [(r.step, bool(r.failed)) for r in reports if isinstance(r, SavingReport)]
    assert saved == [(1, True), (2, True), (3, False)]


def test_unknown_free_space_does_not_stop_the_run(tmp_path, monkeypatch):
    def unknown(_: Path) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "free_bytes", unknown)
    reports = train(tmp_path, monkeypatch, refuses=lambda step: step == 2)
    assert isinstance(reports[-1], DoneReport)


def test_error_of_a_failed_final_save_has_the_reason(tmp_path, monkeypatch):
    with pytest.raises(TrainingError, match=r"Permission denied \(needs [\d,]+ bytes, [\d,]+ are"):
        train(tmp_path, monkeypatch, refuses=lambda step: step > 2, reason=errno.EACCES)


def test_run_that_is_moved_while_it_trains_says_so(tmp_path, monkeypatch):
    moved = tmp_path / "moved"

    def move(report: RunReport) -> None:
        if isinstance(report, EvalReport) and not moved.exists():
            (tmp_path / "model").rename(moved)

    with pytest.raises(TrainingError, match=r"model was moved or deleted while the run trained"):
        train(tmp_path, monkeypatch, meanwhile=move)
    assert run_state.has_run(moved)
