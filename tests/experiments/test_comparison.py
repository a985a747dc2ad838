"""Runs compared: which are found, what differs, groups with intervals, and what is warned of."""

import json
import shutil

import numpy as np
import pytest

from support.runs import simulate_run
from tgen.errors import TrainingError, UsageError
from tgen.experiments.comparison import compare_runs
from tgen.planning.costs import flops_per_token
from tgen.runs import log
from tgen.runs.run_record import RunRecord
from tgen.runs.saved_state import load_record


@pytest.fixture
def make(finished_run, tmp_path):
    """Write a simulated run of a name; see `simulate_run`."""

    def write(name, losses=(3.0, 2.5, 2.0), **settings):
        return simulate_run(tmp_path / name, finished_run / "model", losses, **settings)

    return write


@pytest.fixture
def study(make):
    """Return the folder of two families of three seeds."""
    for family, loss in (("gpt2", 2.5), ("llama", 2.0)):
        for seed in (1, 2, 3):
            losses = [loss + 1, loss + 0.1 * seed - 0.2]
            folder = make(f"{family}-{seed}", losses, family=family, seed=seed)
    return folder.parent


def names(report):
    return [run.name for run in report.runs]


def test_summary_equals_the_record_and_the_log_of_a_real_run(finished_run):
    (run,) = compare_runs([finished_run / "model"]).runs
    record = RunRecord.from_dict(load_record(finished_run / "model")[0])
    records = log.read(finished_run / "model")
    evaluations = [one for one in records if one["kind"] == "EvalReport"]
    done = records[-1]
    assert (run.state, run.run_id) == ("finished", record.run_id)
    assert run.best == done["best_bits_per_byte"]
    assert run.final == evaluations[-1]["bits_per_byte"]
    assert run.curve.bits_per_byte == [one["bits_per_byte"] for one in evaluations]
    assert run.curve.step == [one["step"] for one in evaluations]
    assert (run.steps, run.tokens) == (done["step"], done["tokens"])
    assert run.flop == run.tokens * flops_per_token(record.plan.model)
    assert run.settings["seed"] == record.plan.train.seed
    assert run.settings["d_model"] == 16


def test_best_loss_is_that_of_the_whole_held_out_text_once_the_run_has_finished(make):
    make("a", [3.0, 2.0], best=2.1)
    make("b", [2.1, 2.4], best=2.2)
    folder = make("c", [3.0, 2.3], best=2.4, state="stopped").parent
    assert [(run.best, run.final) for run in compare_runs([folder]).runs] == [
        (2.1, 2.1),
        (2.2, 2.4),
        (2.3, 2.3),
    ]


def test_directories_of_runs_and_patterns_name_runs(study):
    expected = [f"{family}-{seed}" for family in ("llama", "gpt2") for seed in (1, 2, 3)]
    for paths in (
        [study],
        [f"{study}/*"],
        [study / "gpt2-1", f"{study}/*-[23]", study / "llama-1"],
    ):
        report = compare_runs(paths)
        assert names(report) == expected, paths
        assert not report.warnings


def test_a_path_that_names_nothing_is_an_error(study, tmp_path):
    for path, words in (("nothing", "does not exist"), ("no*", "no directory matches")):
        with pytest.raises(UsageError, match=words):
            compare_runs([study / "gpt2-1", tmp_path / path])


def test_only_what_differs_is_listed_and_families_imply_their_defaults(study, make):
    report = compare_runs([study])
    assert report.differing == ["family", "seed"]
    assert report.columns == ["family", "seed"]
    assert report.configurations == [0, 0, 0, 1, 1, 1]
    make("gpt2-4", family="gpt2", seed=1, tied_embeddings=False, warmup_steps=7)
    report = compare_runs([study])
    assert report.differing == ["family", "tied_embeddings", "seed", "warmup_steps"]
    assert report.columns == ["family", "tied_embeddings", "seed"]
    alike = compare_runs([study / "gpt2-1", study / "gpt2-1"])
    assert alike.differing == []


def test_groups_have_means_and_intervals_over_runs(study, make):
    make("gpt2-4", [3.0, 1.0], family="gpt2", seed=4, state="unfinished")
    make("qwen3", [3.0, 2.9], family="qwen3", seed=1)
    llama, gpt2, alone = compare_runs([study], by=["family"]).groups
    assert llama.values == {"family": "llama"}
    assert gpt2.runs == ["gpt2-1", "gpt2-2", "gpt2-3"]
    assert gpt2.best.mean == pytest.approx(2.5)
    assert gpt2.best.half_width == pytest.approx(4.3027 * 0.1 / np.sqrt(3), abs=1e-4)
    assert (alone.best.mean, alone.best.is_finite) == (2.9, False)
    curve = gpt2.curves["step"]
    assert curve.x == [100, 200]
    assert [one.mean for one in curve.intervals] == pytest.approx([3.5, 2.5])
    assert curve.intervals[0].half_width == 0
    by_both = compare_runs([study], by=["family", "seed"]).groups
    assert len(by_both) == 7


def test_mean_curve_interpolates_between_evaluations_where_all_runs_have_one(make):
    make("a", [3.0, 2.0], seed=1, seconds=0.1)  # after 10 and 20 seconds
    folder = make("b", [3.0, 2.0, 1.0], seed=2, seconds=0.15)  # after 15, 30 and 45 seconds
    (group,) = compare_runs([folder.parent], by=["family"]).groups
    curve = group.curves["time"]
    assert curve.x == [15, 20]
    assert [one.mean for one in curve.intervals] == pytest.approx([2.75, (2 + 8 / 3) / 2])


def test_losses_on_other_texts_are_kept_apart_with_a_warning(make):
    make("a", [3.0, 2.0])
    make("b", [3.0, 1.0], corpus_sha256="0" * 64)
    folder = make("c", [3.0, 1.5]).parent
    report = compare_runs([folder], by=["family"])
    assert names(report) == ["c", "a", "b"]
    assert len(report.groups) == 2
    (warning,) = report.warnings
    assert warning == "the held-out texts differ, so their losses cannot be compared: c, a; b"


def test_what_cannot_be_compared_is_left_out_with_a_line(make):
    folder = make("a").parent
    make("no-log")
    (folder / "no-log" / "training" / "log.jsonl").unlink()
    make("damaged")
    (folder / "damaged" / "training" / "run.json").write_text("{")
    make("line")
    with (folder / "line" / "training" / "log.jsonl").open("a") as file:
        file.write("nothing\n{}\n")
    make("no-step", [])
    make("back")
    with (folder / "back" / "training" / "log.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"kind": "EvalReport", "step": 1, "seconds": 99, "loss": 1, "bits_per_byte": 1}
            )
            + "\n"
        )
    make("infinite")
    with (folder / "infinite" / "training" / "log.jsonl").open("a") as file:
        file.write('{"kind": "StepReport", "step": 1e999}\n')
    (folder / "other").mkdir()
    report = compare_runs([f"{folder}/*", folder / "other" / ".." / "a"])
    assert names(report) == ["a"]
    lines = "\n".join(report.warnings)
    for words in (
        "a is named twice",
        "no-log is left out: ",
        "damaged is left out: ",
        "line is left out: ",
        "no-step is left out: the training log has no steps yet",
        "back is left out: training log: the evaluations are not in order",
        "infinite is left out: training log: invalid step",
        "other is left out: no training/run.json",
        "a is the only run",
    ):
        assert words in lines
    with pytest.raises(TrainingError, match="left out"):
        compare_runs([folder / "no-log"])


def test_unfinished_runs_and_copies_are_named(make):
    folder = make("a", state="unfinished", seed=1).parent
    make("b", state="stopped", seed=2)
    make("c", seed=3)
    make("d", state="diverged", seed=4)
    shutil.copytree(folder / "c", folder / "copy")
    lines = compare_runs([folder], by=["family"]).warnings
    assert lines == [
        "stopped before the end: b",
        "not finished: a",
        "diverged: d",
        "c and copy are the same run, not two results",
        "not in the means, since they have not finished: a, b, d",
    ]


def test_a_run_counts_once_in_a_mean_and_mixed_settings_are_named(make):
    for name, settings in (("a", {}), ("b", {}), ("c", {"learning_rate": 0.01})):
        folder = make(name, [2.0], run_id=name, **settings).parent
    report = compare_runs([folder], by=["family"])
    assert [group.runs for group in report.groups] == [["a", "c"]]
    assert report.warnings == [
        "a and b are the same run, not two results",
        "learning_rate differs within a group: its interval is not that of chance alone",
    ]
    assert len(compare_runs([folder], by=["family", "learning_rate"]).warnings) == 1


def test_unknown_setting_of_groups_is_an_error_with_a_hint(study):
    with pytest.raises(UsageError, match="--by familly") as caught:
        compare_runs([study], by=["familly"])
    assert caught.value.hint == "did you mean family?"


def test_no_file_is_changed(study):
    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    compare_runs([study], by=["family"])
    assert {path: path.read_bytes() for path in study.rglob("*") if path.is_file()} == before
