"""Early stopping."""

import random
from pathlib import Path

import pytest

from support.runs import request, resume
from tgen import runs
from tgen.config.training import ResolvedTrainConfig, TrainConfig
from tgen.reports.training import DoneReport, EvalReport, RollbackReport, StepReport
from tgen.runs import log as run_log
from tgen.training.early_stopping import decay_from_best, record_evaluation
from tgen.training.evaluation import Evaluation
from tgen.training.state import Progress

# Random letters: a model can only memorize them.
NOISE = "".join(random.Random(0).choices("abcdefgh ", k=300)).encode()
OVERFITTING = {
    "d_model": "64",
    "n_layers": "1",
    "context_length": "32",
    "eval_every": "10",
    "patience": "2",
    "dropout": "0",
    "learning_rate": "0.01",
    "matrix_learning_rate": "0.05",
}


def noisy(folder, name="model"):
    (folder / "corpus.txt").write_bytes(NOISE)
    return request(folder, name, train=TrainConfig(steps=300), overrides=OVERFITTING)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the reports of an uninterrupted run, and its directory."""
    folder = tmp_path_factory.mktemp("noisy")
    return list(runs.start(noisy(folder))), folder / "model"


def test_run_without_improvement_restores_the_best_checkpoint_decays_and_ends_early(whole):
    reports, _ = whole
    (back,) = [r for r in reports if isinstance(r, RollbackReport)]
    scores = [
        (r.bits_per_byte, r.step)
        for r in reports[: reports.index(back)]
        if isinstance(r, EvalReport)
    ]
    assert back.step == min(scores)[1]
    after = [r for r in reports[reports.index(back) :] if isinstance(r, StepReport)]
    assert after[0].step == back.step + 1
    assert [r.learning_rate for r in after] == sorted(
        (r.learning_rate for r in after), reverse=True
    )
    done = reports[-1]
    assert isinstance(done, DoneReport)
    assert done.stopped_early
    assert done.step < 300
    assert done.best_bits_per_byte <= min(scores)[0]


@pytest.mark.parametrize("kind", ["EvalReport", "RollbackReport", "StepReport"])
def test_run_killed_around_the_rollback_ends_the_same(whole, tmp_path, kind):
    expected, out = whole
    back = next(i for i, r in enumerate(expected) if isinstance(r, RollbackReport))
    last = {"EvalReport": back - 2, "RollbackReport": back, "StepReport": back + 3}[kind]
    reports = runs.start(noisy(tmp_path, "parts"))
    for _ in range(last + 1):
        next(reports)
    reports.close()
    list(resume(tmp_path / "parts", threads=1))

    def log(folder: Path) -> list[tuple[object, ...]]:
        kinds = ("StepReport", "EvalReport", "RollbackReport")
        records = [r for r in run_log.read(folder) if r["kind"] in kinds]
        return [(r["kind"], r["step"], r.get("loss")) for r in records]

    folders = (out, tmp_path / "parts")
    assert log(folders[0]) == log(folders[1])
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]


def scored(bits, parts=()):
    return Evaluation(loss=bits, bits_per_byte=bits, standard_error=None, parts=list(parts))


def test_patience_counts_significant_changes_only():
    config, progress = ResolvedTrainConfig(patience=1), Progress(step=1)
    assert record_evaluation(progress, config, scored(3.0, [10, 12, 9, 11]))
    record_evaluation(progress, config, scored(3.1, [14, 8, 13, 9]))  # 2 more, standard error 9.2
    assert progress.worse_evals == 0
    record_evaluation(progress, config, scored(3.2, [11, 13, 9.5, 11.5]))  # 3 more, 0.6
    assert progress.worse_evals == 1
    assert progress.restore_best


def test_fluctuations_do_not_end_a_run_but_a_rise_does():
    config, progress = ResolvedTrainConfig(patience=3), Progress()
    for step, bits in enumerate([3.0, 2.9, 3.1, 3.2, 3.1, 3.2, 3.0, 3.1, 3.2], start=1):
        progress.step = step
        record_evaluation(progress, config, scored(bits))
        assert not progress.restore_best
    record_evaluation(progress, config, scored(3.3))
    assert progress.restore_best
    assert (progress.best_step, progress.best_bits_per_byte) == (2, 2.9)


def test_patience_counts_evaluations_and_restarts_in_the_decay():
    config = ResolvedTrainConfig(steps=1000, patience=2)
    progress = Progress(step=10)
    assert record_evaluation(progress, config, scored(3.0))
    for step, bits in ((20, 3.1), (30, 3.1)):
        assert not progress.restore_best
        progress.step = step
        assert not record_evaluation(progress, config, scored(bits))
    assert progress.restore_best
    progress = Progress(step=70, best_step=70, best_bits_per_byte=3.0)
    decay_from_best(progress, config)
    assert (progress.decay_start, progress.total_steps) == (70, 100)
    for step in (80, 90):
        progress.step = step
        record_evaluation(progress, config, scored(3.2))
    assert progress.total_steps == 90
    # Evaluations before the decay do not count in it.
    planned = Progress(step=600, best_bits_per_byte=3.0, decay_start=650, total_steps=1000)
    for step, end in ((640, 1000), (700, 1000), (760, 760)):
        planned.step = step
        record_evaluation(planned, config, scored(3.2))
        assert planned.total_steps == end
    never = Progress(step=10, best_bits_per_byte=1.0)
    for _ in range(50):
        record_evaluation(never, ResolvedTrainConfig(patience=0), scored(2.0))
    assert not never.restore_best
