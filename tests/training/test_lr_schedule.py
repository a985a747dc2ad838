"""When the rate falls and when a run ends."""

import random

import pytest

from support.runs import request, resume
from tgen import runs
from tgen.config import TrainConfig
from tgen.reports import DoneReport, EvalReport, RollbackReport, StepReport
from tgen.runs.storage import log as run_log
from tgen.training.early_stopping import (
    begin_decay_if_due,
    begin_early_decay,
    note_evaluation,
)
from tgen.training.state import Progress

# Letters without order: all there is to learn is by heart.
NOISE = "".join(random.Random(0).choices("abcdefgh ", k=900)).encode()
OVERFITTING = {
    "d_model": "32",
    "n_layers": "2",
    "eval_every": "10",
    "patience": "2",
    "dropout": "0",
    "learning_rate": "0.01",
    "matrix_learning_rate": "0.1",
}


def noisy(folder, name="model"):
    (folder / "corpus.txt").write_bytes(NOISE)
    return request(folder, name, train=TrainConfig(steps=300), overrides=OVERFITTING)


def test_a_run_that_gets_no_better_goes_back_decays_and_ends_early(tmp_path):
    reports = list(runs.start(noisy(tmp_path)))
    (back,) = [r for r in reports if isinstance(r, RollbackReport)]
    scores = [
        (r.bits_per_byte, r.step)
        for r in reports[: reports.index(back)]
        if isinstance(r, EvalReport)
    ]
    assert back.step == min(scores)[1] == scores[-3][1]
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


@pytest.mark.parametrize("kind", ["EvalReport", "BackReport", "StepReport"])
def test_killed_around_the_return_it_ends_the_same(tmp_path, kind):
    whole = list(runs.start(noisy(tmp_path, "whole")))
    back = next(i for i, r in enumerate(whole) if isinstance(r, RollbackReport))
    last = {"EvalReport": back - 2, "BackReport": back, "StepReport": back + 3}[kind]
    reports = runs.start(noisy(tmp_path, "parts"))
    for _ in range(last + 1):
        next(reports)
    reports.close()
    list(resume(tmp_path / "parts", threads=1))

    def log(name: str) -> list[tuple[object, ...]]:
        kinds = ("StepReport", "EvalReport", "BackReport")
        records = [r for r in run_log.read(tmp_path / name) if r["kind"] in kinds]
        return [(r["kind"], r["step"], r.get("loss")) for r in records]

    assert log("parts") == log("whole")
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_the_end_is_brought_forward_where_the_machine_has_become_slower():
    config = TrainConfig(minutes=1)
    progress = Progress(step=100, steps_taken=100, seconds=44, decay_start=90, total_steps=140)
    begin_decay_if_due(progress, config)
    assert progress.total_steps == 134  # 16 seconds, 0.9 of them to leave, at 0.44 a step
    on_time = Progress(step=100, steps_taken=100, seconds=40, decay_start=90, total_steps=140)
    begin_decay_if_due(on_time, config)
    assert on_time.total_steps == 140


def test_patience_counts_evaluations_and_begins_again_in_the_decay():
    config = TrainConfig(steps=1000, patience=2)
    progress = Progress(step=10)
    assert note_evaluation(progress, config, 3.0)
    for step, bits in ((20, 3.1), (30, 3.1)):
        assert not progress.go_back
        progress.step = step
        assert not note_evaluation(progress, config, bits)
    assert progress.go_back
    progress = Progress(step=70, best_step=70, best_bits_per_byte=3.0)
    begin_early_decay(progress, config)
    assert (progress.decay_start, progress.total_steps) == (70, 100)
    for step in (80, 90):
        progress.step = step
        note_evaluation(progress, config, 3.2)
    assert progress.total_steps == 90
    # What was not better before the decay does not count in it.
    planned = Progress(step=600, best_bits_per_byte=3.0, decay_start=650, total_steps=1000)
    for step, end in ((640, 1000), (700, 1000), (760, 760)):
        planned.step = step
        note_evaluation(planned, config, 3.2)
        assert planned.total_steps == end
    never = Progress(step=10, best_bits_per_byte=1.0)
    for _ in range(50):
        note_evaluation(never, TrainConfig(patience=0), 2.0)
    assert not never.go_back
