"""Sweeps: their runs are those of `tgen train`, also after kills and with several processes."""

import json
from dataclasses import replace
from itertools import count, zip_longest

import pytest

from support.models import TEXT
from support.runs import request
from tgen import runs
from tgen.config.training import TrainConfig
from tgen.errors import CorpusError, TrainingError, UsageError
from tgen.experiments.sweep import SweepRequest, dry_run, run_names, sweep, training_order
from tgen.reports.sweep import SweepPlanReport, SweepRunReport
from tgen.reports.training import StepReport
from tgen.runs import log as run_log
from tgen.runs import prepare


def make(folder, name="sweep", *, values=None, n_seeds=2, steps=4, **more):
    values = values or [{"learning_rate": "1e-3"}, {"learning_rate": "0.03"}]
    train = TrainConfig(steps=steps, seed=7)
    cells = [(one, request(folder, overrides=one, train=train)) for one in values]
    return SweepRequest(out=folder / name, cells=cells, seeds=[*range(7, 7 + n_seeds)], **more)


def results(reports):
    """Return the losses of the runs that ended, by name; each is reported once per rung."""
    done = [r for r in reports if isinstance(r, SweepRunReport) and r.state == "done"]
    return {report.name: report.bits_per_byte for report in done}


def done_reports(path):
    lines = [line for line in run_log.read(path) if line["kind"] == "DoneReport"]
    assert all(line["finished"] for line in lines)
    return lines


def own_loss(path):
    return done_reports(path)[-1]["best_bits_per_byte"]


def weights(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/model.safetensors")}


def test_runs_are_those_of_train_and_so_are_the_results(tmp_path):
    asked = make(tmp_path)
    reports = list(sweep(asked))
    shown = results(reports)
    names = [name for cell in run_names(asked) for name in cell]
    assert names[0] == "learning_rate=1e-3_seed=7"
    assert shown == {name: own_loss(asked.out / name) for name in names}
    assert len(set(shown.values())) == 4
    alone = replace(asked.cells[1][1], train=TrainConfig(steps=4, seed=8), out=tmp_path / "alone")
    list(runs.start(alone))
    theirs = asked.out / "learning_rate=0.03_seed=8" / "model.safetensors"
    assert theirs.read_bytes() == (tmp_path / "alone" / "model.safetensors").read_bytes()
    (plan,) = [report for report in reports if isinstance(report, SweepPlanReport)]
    assert [cell.steps for cell in plan.cells] == [4, 4]
    assert plan.cells[0].n_parameters > 1000


def test_plan_counts_the_runs_that_have_ended(tmp_path):
    asked = make(tmp_path)
    assert [*dry_run(asked)][-1].n_done == [0, 0]
    n_steps = 13  # one run ends for each cell, then the second cell's other one, and one is left
    for report in (reports := sweep(asked)):
        n_steps -= isinstance(report, StepReport)
        if n_steps == 0:
            reports.close()
    assert [*dry_run(asked)][-1].n_done == [1, 2]
    list(sweep(asked))
    assert [*dry_run(asked)][-1].n_done == [2, 2]
    (asked.out / "learning_rate=0.03_seed=8" / "training" / "run.json").write_text("{")
    assert [*dry_run(asked)][-1].n_done == [2, 1]


def test_run_without_its_model_is_not_finished(tmp_path):
    asked = make(tmp_path, n_seeds=1, steps=2)
    list(sweep(asked))
    before = weights(asked.out)
    for path in asked.out.glob("*1e-3*/model.safetensors"):
        path.unlink()
    reports = [r for r in sweep(asked) if isinstance(r, SweepRunReport)]
    assert [r.state for r in reports] == ["training", "done", "done"]
    assert weights(asked.out) == before


def test_order_interleaves_the_cells():
    assert training_order([0, 1, 2], 2) == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (0, 1)]


def test_killed_sweep_continues_to_the_same_runs(tmp_path):
    list(sweep(make(tmp_path, "whole", n_seeds=1)))
    asked = make(tmp_path, "parts", n_seeds=1)
    for n_steps in (3, 6, 100):  # in the first run, in the second one after it, never
        for report in (reports := sweep(asked)):
            n_steps -= isinstance(report, StepReport)
            if n_steps == 0:
                reports.close()
    assert n_steps == 100 - 4  # the second run began again: it had not saved a step
    assert weights(asked.out) == weights(tmp_path / "whole")
    again = list(sweep(asked))
    assert not [report for report in again if isinstance(report, StepReport)]
    assert results(again) == {name: own_loss(asked.out / name) for name in weights(asked.out)}


def test_stopped_sweep_saves_and_continues(tmp_path):
    asked = make(tmp_path)
    stops = iter([False, True])
    *_, last = sweep(asked, stopped=lambda: next(stops, True))
    assert not last.finished
    steps = [report.step for report in sweep(asked) if isinstance(report, StepReport)]
    assert steps[:2] == [3, 4]
    assert len(steps) == 4 * 4 - 2


def test_several_processes_train_each_run_once(tmp_path):
    asked = make(tmp_path)
    waits = []
    pairs = zip_longest(*(sweep(asked, wait=lambda: waits.append(1)) for _ in range(2)))
    reports = [report for pair in pairs for report in pair if report is not None]
    steps = [report for report in reports if isinstance(report, StepReport)]
    assert len(steps) == 4 * 4
    done = [r for r in reports if isinstance(r, SweepRunReport) and r.state == "done"]
    assert len(done) == 2 * 4  # both know all results


def test_halving_trains_the_better_cells_longer(tmp_path):
    values = [{"learning_rate": rate} for rate in ("1e-9", "3e-3", "1e-2", "0.3")]
    asked = make(tmp_path, values=values, n_seeds=1, steps=8, halving=True)
    for report in (killed := sweep(asked)):  # in the second rung
        if isinstance(report, SweepRunReport) and (report.rung, report.n_left) == (1, 1):
            killed.close()
    reports = list(sweep(asked))
    (plan,) = [report for report in reports if isinstance(report, SweepPlanReport)]
    assert [rung.n_cells for rung in plan.rungs] == [4, 2]
    names = [name for (name,) in run_names(asked)]
    done = {name: done_reports(asked.out / name) for name in names}
    at_half = {name: lines[0]["best_bits_per_byte"] for name, lines in done.items()}
    better = sorted(names, key=at_half.__getitem__)[:2]
    assert {name: [line["step"] for line in lines] for name, lines in done.items()} == {
        name: [4, 8] if name in better else [4] for name in names
    }
    assert results(reports) == {name: own_loss(asked.out / name) for name in better}
    (kept,) = json.loads((asked.out / "sweep.json").read_text())["kept"]
    assert {names[cell] for cell in kept} == {*better}


def test_slow_process_leaves_what_another_one_has_trained_further(tmp_path):
    values = [{"learning_rate": rate} for rate in ("1e-9", "3e-3", "1e-2")]
    asked = make(tmp_path, values=values, steps=4, n_seeds=1, halving=True)
    slow = sweep(asked)
    assert next(r.state for r in slow if isinstance(r, SweepRunReport)) == "training"
    steps = [report.step for report in sweep(asked) if isinstance(report, StepReport)]
    assert steps == [1, 2, 1, 2, 1, 2, 3, 4, 3, 4]
    record, trained = (asked.out / "sweep.json").read_text(), weights(asked.out)
    states = [report.state for report in slow if isinstance(report, SweepRunReport)]
    assert states == ["done"] * 3 + ["done"] * 2  # without one step
    assert (asked.out / "sweep.json").read_text() == record
    assert weights(asked.out) == trained


def test_equal_or_invalid_combinations_are_refused_before_the_first_run(tmp_path):
    for values, message in [
        (
            [{"learning_rate": "1e-3"}, {"learning_rate": "0.001"}],
            "are the same: .*1e-3 and .*0.001",
        ),
        ([{"learning_rate": "1e-3"}, {"learning_rate": "-1"}], "learning_rate: invalid value -1"),
        ([{"n_heads": "2"}, {"n_heads": "3"}], "d_model=16 does not divide into n_heads=3"),
        (
            [{"context_length": "16"}, {"context_length": "100000000"}],
            r"is longer than .* \(combination context_length=100000000\)",
        ),
        ([{"n_layer": "2"}, {"n_layer": "3"}], "unknown field"),
    ]:
        with pytest.raises((CorpusError, UsageError), match=message):
            list(sweep(make(tmp_path, values=values)))
        assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("start", [sweep, dry_run])
def test_other_sweeps_and_files_are_left_alone(tmp_path, start):
    list(sweep(make(tmp_path, steps=2)))
    with pytest.raises(UsageError, match=r"has a sweep with other settings \(steps\)"):
        list(start(make(tmp_path, steps=3)))
    with pytest.raises(UsageError, match=r"has a sweep with other seeds$"):
        list(start(make(tmp_path, steps=2, n_seeds=1)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UsageError, match="other contains other files: file"):
        list(start(make(tmp_path, "other")))
    (tmp_path / "other" / "sweep.json").write_text('{"cells": []}')
    with pytest.raises(TrainingError, match=r"sweep\.json is damaged"):
        list(start(make(tmp_path, "other")))
    assert (tmp_path / "other" / "sweep.json").read_text() == '{"cells": []}'


def test_changed_corpus_ends_the_sweep(tmp_path):
    asked = make(tmp_path, steps=2)
    for report in (reports := sweep(asked)):
        if isinstance(report, SweepRunReport) and report.state == "done":
            reports.close()
    (tmp_path / "corpus.txt").write_bytes(TEXT + b"more")
    with pytest.raises(CorpusError, match="corpus has changed since the sweep"):
        list(sweep(asked))
    assert len(weights(asked.out)) == 1


def test_failed_run_leaves_the_others(tmp_path, monkeypatch):
    start = runs.start

    def fail(run, **values):
        if "1e-3" in run.out.name:
            raise TrainingError("it diverged")
        return start(run, **values)

    monkeypatch.setattr(runs, "start", fail)
    reports = [r for r in sweep(make(tmp_path, steps=2)) if isinstance(r, SweepRunReport)]
    assert [r.reason for r in reports if r.state == "failed"] == ["it diverged"] * 2
    assert len(results(reports)) == 2


def test_budget_in_flop_gives_more_steps_to_smaller_models(tmp_path):
    values = [{"d_model": "16"}, {"d_model": "32"}]
    *_, plan = dry_run(make(tmp_path, values=values, flop=1e8))
    small, large = plan.cells
    assert small.steps > large.steps > 1
    assert plan.seconds == pytest.approx(2 * (small.seconds + large.seconds))
    assert not (tmp_path / "sweep").exists()


def test_runs_share_what_depends_on_the_measured_speed(tmp_path, monkeypatch):
    speeds, started = (10.0**-n for n in count(-13)), []  # every measurement has another result
    monkeypatch.setattr(prepare, "measure_speed", lambda *_, **__: next(speeds))
    values = [{"learning_rate": "1e-3"}, {"learning_rate": "3e-3"}]
    cells = [(one, request(tmp_path, train=TrainConfig(minutes=5))) for one in values]
    cells = [(one, replace(run, overrides=one)) for one, run in cells]

    def start(run, **_):
        started.append(run)
        list(runs.dry_run_reports(run))  # nothing that is shared is wrong for slower runs
        raise TrainingError("not in a test")
        yield

    monkeypatch.setattr(runs, "start", start)
    asked = SweepRequest(out=tmp_path / "sweep", cells=cells, seeds=[1, 2])
    (plan, *_) = (r for r in sweep(asked) if isinstance(r, SweepPlanReport))
    assert plan.cells[0].settings.keys() > {"precision", "batch_size"}
    assert len(started) == 4
    for run in started:
        settings = {name: getattr(run.train, name) for name in plan.cells[0].settings}
        assert (run.size, settings) == (plan.cells[0].size, plan.cells[0].settings)
