"""Resuming: intact states of the same run only, and the settings it was started with."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from support.runs import contents, load_run, plan_of, request, resume, start_run
from tgen import runs
from tgen.checkpoint import model_dir
from tgen.errors import ModelError, TgenError, TrainingError, UsageError
from tgen.reports.training import DoneReport, EvalReport, RunReport
from tgen.runs import manifest, prepare
from tgen.runs import saved_state as run_state
from tgen.storage import files


def test_changed_settings_are_refused_or_recorded(finished):
    same = {
        "settings": {"steps": 14, "seed": 1337},
        "overrides": {"dropout": "0.1", "n_layers": "1"},
    }
    list(resume(finished, threads=1, **same))
    with pytest.raises(TrainingError, match=r"dropout differs \(got 0\.2, this run has 0\.1"):
        list(resume(finished, overrides={"dropout": "0.2"}))
    with pytest.raises(UsageError, match=r"n_layers: cannot be changed \(got 2, "):
        list(resume(finished, overrides={"n_layers": "2"}, override=True))
    with pytest.raises(UsageError, match=r"optimizer: cannot be changed \(got adamw, "):
        list(resume(finished, overrides={"optimizer": "adamw"}, override=True))
    start = not load_run(finished)[0]["plan"]["train"]["bigram_start"]
    with pytest.raises(UsageError, match="bigram_start: cannot be changed"):
        list(resume(finished, overrides={"bigram_start": str(start).lower()}, override=True))
    with pytest.raises(UsageError, match="the run is already at step 14"):
        list(resume(finished, settings={"steps": 9}, override=True))
    with pytest.raises(UsageError, match="the run has already taken 0"):
        list(resume(finished, settings={"minutes": 1e-4}, override=True))
    longer = {"settings": {"steps": 20}, "overrides": {"learning_rate": "0.001"}}
    reports = list(resume(finished, threads=1, override=True, **longer))
    assert isinstance(reports[-1], DoneReport)
    assert reports[-1].step == 20
    notes = load_run(finished)[0]["overridden"]
    assert notes[0] == "from step 14: steps 14 -> 20"
    assert notes[1].startswith("from step 14: learning_rate 0.00")
    assert notes[1].endswith(" -> 0.001")
    assert notes == plan_of(reports).notes[-2:]
    # The old plan's rows are wrong now.
    assert not {"steps", "learning rate"} & {row.name for row in plan_of(reports).choices}
    # Now they are the settings of the run.
    list(resume(finished, threads=1, **longer))


def test_keep_checkpoints_limits_the_number_of_states(tmp_path):
    list(runs.start(request(tmp_path, overrides={"eval_every": "2", "keep_checkpoints": "4"})))
    names = {path.name for path in (tmp_path / "model" / "training").glob("state-*")}
    assert {f"state-{step:08d}" for step in (8, 10, 12, 14)} <= names
    assert len(names) <= 5  # and the best
    with pytest.raises(UsageError, match="keep_checkpoints"):
        list(runs.start(request(tmp_path, "none", overrides={"keep_checkpoints": "1"})))


class KilledError(BaseException):
    """Stand-in for SIGKILL."""


def die(*_: object, **__: object) -> None:
    raise KilledError


@pytest.fixture
def other(tmp_path):
    """Return options to resume with another corpus, for a run that stopped after step 7."""
    stops = iter([False] * 6 + [True])
    list(runs.start(request(tmp_path), stopped=lambda: next(stops)))
    path = tmp_path / "other.txt"
    path.write_bytes((tmp_path / "corpus.txt").read_bytes().swapcase()[:-500])
    return {"corpus": [str(path)], "override": True, "threads": 1}


def test_new_corpus_is_trained_on_and_recorded(tmp_path, other):
    out = tmp_path / "model"
    before = load_run(out)[0]
    with pytest.raises(TrainingError, match="the corpus has changed"):
        list(resume(out, **other | {"override": False}))
    reports = list(resume(out, **other))
    run, tokens = load_run(out)
    assert run["overridden"][0].startswith("from step 7: corpus ")
    assert plan_of(reports).notes[-1] == run["overridden"][0]
    assert run["corpus"] == other["corpus"]
    assert run["corpus_sha256"] != before["corpus_sha256"]
    kinds = [path.name for path in (out / "training").glob("tokens*")]
    assert kinds == ["tokens-1.safetensors"]
    evaluations = [report for report in reports if isinstance(report, EvalReport)]
    assert evaluations[0].best  # the loss on the old corpus does not count
    fresh = request(
        tmp_path, "fresh", corpus=other["corpus"], tokenizer=str(out / "training/tokenizer.json")
    )
    start_run(fresh)
    for name, array in load_run(tmp_path / "fresh")[1].items():
        assert (array[:] == tokens[name][:]).all()
    with pytest.raises(UsageError, match="the run has ended at step 14"):
        list(resume(out, **other | {"corpus": [str(tmp_path / "corpus.txt")]}))
    assert list(resume(out, threads=1))[-1].finished  # with the new corpus


def test_killed_corpus_change_is_complete_or_undone(tmp_path, other, monkeypatch):
    out, copies = tmp_path / "model", [tmp_path / name for name in ("old", "early", "late")]
    for copy in copies:
        shutil.copytree(out, copy)
    old, early, late = copies
    list(resume(old, threads=1))
    list(resume(out, **other))
    for copy, call in ((early, "save_record"), (late, "drop_other_tokens")):
        with monkeypatch.context() as patch:
            patch.setattr(run_state, call, die)
            with pytest.raises(KilledError):
                list(resume(copy, **other))
        list(resume(copy, threads=1))
    assert contents(early) == contents(old)
    assert contents(late) == contents(out)
    assert contents(early) != contents(late)


def test_corpus_change_resets_the_best_loss(tmp_path, other):
    out = tmp_path / "model"
    saved = run_state.load_state(out, run_id=load_run(out)[0]["run_id"])
    run_state.save_progress(out, saved.progress | {"best_bits_per_byte": 0.001, "worse_evals": 4})
    done = list(resume(out, **other))[-1]
    assert done.best_bits_per_byte > 0.001
    assert done.best_step > 7
    assert not done.stopped_early


def damage(state: Path, how: str) -> None:
    arrays, manifest = state / "state.safetensors", state / "manifest.json"
    whole = arrays.read_bytes()
    if how == "cut short":
        arrays.write_bytes(whole[:-1])
    elif how == "one bit":
        arrays.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    elif how == "zeros":
        arrays.write_bytes(bytes(len(whole)))
    elif how == "gone":
        arrays.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "changed manifest":
        manifest.write_text(manifest.read_text().replace('"step": ', '"step": 1'))
    else:
        manifest.write_bytes(b"\0" * 100)


@pytest.mark.parametrize(
    "how",
    ["cut short", "one bit", "zeros", "gone", "no manifest", "changed manifest", "garbage"],
)
def test_damaged_state_is_renamed_and_the_previous_one_is_used(finished, how):
    whole = contents(finished)
    *_, before, newest = sorted((finished / "training").glob("state-*"))
    damage(newest, how)
    reports = list(resume(finished, threads=1))
    assert any("renamed to damaged-state-00000014" in note for note in plan_of(reports).notes)
    assert plan_of(reports).resumed_at_step == int(before.name[-8:]) == 10
    assert (finished / "training" / "damaged-state-00000014").is_dir()
    after = {name: one for name, one in contents(finished).items() if "damaged" not in name}
    assert after == whole
    for state in (finished / "training").glob("state-*"):
        damage(state, how)
    with pytest.raises(TrainingError, match="no training state in"):
        list(resume(finished))
    assert len(list((finished / "training").glob("damaged-*"))) >= 3


@pytest.mark.parametrize("how", ["missing", "unknown", "id", "dtype", "mask", "short"])
def test_forged_tokens_are_an_error(finished, how):
    record, tokens = load_run(finished)
    train = tokens["train"][:]
    arrays = {"train": train, "val": tokens["val"][:]} | {
        "missing": {},
        "unknown": {"x": train},
        "id": {"train": np.full_like(train, record["plan"]["model"]["vocab_size"])},
        "dtype": {"val": np.ones(3, np.float32)},
        "mask": {"train_loss_mask": np.ones(len(train) - 1, bool)},
        "short": {"train": train[:1]},
    }[how]
    if how == "missing":
        del arrays["val"]
    entry = run_state.save_tokens(finished, record, arrays)
    run_state.save_record(finished, record, entry)
    with pytest.raises(TrainingError, match=r"tokens\.safetensors is damaged"):
        list(resume(finished))


def test_resuming_with_too_little_memory_is_an_error(finished, monkeypatch):
    monkeypatch.setattr("tgen.runs.rank_checks.rank_bytes", lambda _: 10_000)
    with pytest.raises(UsageError, match=r"needs about \d+\.\d KB of memory .*; 10\.0 KB is"):
        list(resume(finished))


@pytest.mark.parametrize("change", [{"d_ff": 7}, {"d_ff": 2**31 - 1}, {"n_layers": 10**9}])
def test_state_that_does_not_fit_the_model_is_an_error_before_it_takes_memory(finished, change):
    path = finished / "training" / "run.json"
    record = json.loads(path.read_bytes())
    record["plan"]["model"] |= change
    path.write_text(json.dumps(record))
    with pytest.raises(TrainingError, match=r"does not fit the model in training/run\.json"):
        list(resume(finished))


@pytest.mark.parametrize(
    "change", [{"seconds": float("inf")}, {"step": -1}, {"total_steps": 0}, {"n_rollbacks": -1}]
)
def test_state_with_impossible_counters_is_an_error(finished, change):
    path = max((finished / "training").glob("state-*/manifest.json"))
    values = json.loads(path.read_bytes())
    values["progress"] |= change
    entries = values.pop("files")
    path.write_bytes(manifest.seal({k: values[k] for k in ("run", "progress", "made_by")}, entries))
    with pytest.raises(TrainingError, match="is not compatible"):
        list(resume(finished))


def test_state_of_another_run_is_not_used(finished, tmp_path):
    list(runs.start(request(tmp_path, "other")))
    mine, other = finished / "training", tmp_path / "other" / "training"
    (mine / "state-00000014").rename(mine / "gone")
    (other / "state-00000014").rename(mine / "state-00000014")
    reports = list(resume(finished, threads=1))
    assert any("belongs to another run" in note for note in plan_of(reports).notes)
    assert plan_of(reports).resumed_at_step == 10


def test_changed_environment_is_reported(finished, monkeypatch):
    *_, last = plan_of(resume(finished, threads=1)).notes
    assert "may differ" not in last
    monkeypatch.setattr(prepare, "__version__", "9.9")
    *_, last = plan_of(resume(finished, threads=1)).notes
    assert last.startswith("results may differ from an uninterrupted run: tgen was ")
    assert last.endswith(", now 9.9")


def end(reports: Iterator[RunReport]) -> int:
    *_, last = reports
    assert isinstance(last, DoneReport)
    return last.step


def test_new_end_applies_to_all_states_after_a_kill(finished, tmp_path, monkeypatch):
    longer = {"threads": 1, "settings": {"steps": 20}, "override": True}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):  # after run.json is written
        patch.setattr(run_state, "save_progress", killed)
        begun = resume(finished, **longer)
        plan_of(begun)
        begun.close()
    shutil.copytree(finished, tmp_path / "damaged")
    assert end(resume(finished, **longer)) == 20
    damage(
        tmp_path / "damaged" / "training" / "state-00000014", "gone"
    )  # the older state still has 14 steps
    assert end(resume(tmp_path / "damaged", threads=1)) == 20


def reseal(state: Path, **changed: object) -> None:
    """Write a changed manifest with a matching digest."""
    values = manifest.read(state)
    described = values.pop("files")
    sealed = json.loads(manifest.seal(values | changed, described))
    del sealed["sha256"]
    sealed["sha256"] = manifest._digest(sealed)
    (state / "manifest.json").write_text(json.dumps(sealed))


def test_states_of_another_version_stay_unchanged(finished):
    newest = finished / "training" / "state-00000014"
    reseal(newest, progress={**manifest.read(newest)["progress"], "moon": 1})
    with pytest.raises(TrainingError, match=r"written by tgen \S+ and is not compatible"):
        list(resume(finished))
    reseal(newest, format=2)
    for _ in range(2):
        with pytest.raises(TrainingError, match="written by another version of tgen"):
            list(resume(finished))
    assert newest.is_dir()
    assert not list((finished / "training").glob("damaged-*"))


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), TgenError("x cannot be opened: Permission denied")]
)
def test_unreadable_state_stays_unchanged(finished, monkeypatch, error):
    digest = files.sha256

    def unreadable(path: Path) -> bytes:
        if path.name == "state.safetensors":
            raise error
        return digest(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", unreadable)
        with pytest.raises(TrainingError, match=r"Input/output error|Permission denied"):
            list(resume(finished))
    assert not list((finished / "training").glob("damaged-*"))
    assert end(resume(finished, threads=1)) == 14


def test_run_with_only_damaged_states_is_an_error(finished):
    for state in (finished / "training").glob("state-*"):
        damage(state, "gone")
    with pytest.raises(TrainingError, match="no training state in"):
        list(resume(finished))
    with pytest.raises(
        TrainingError, match=r"has no training state \(damaged-state-.*, damaged-state"
    ):
        list(resume(finished))


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json", "tokenizer.json", "*"])
def test_resumed_run_writes_lost_files_of_its_model_again(lost, finished):
    before = contents(finished)
    for path in finished.glob(lost):
        if path.is_file():
            path.unlink()
    with pytest.raises(ModelError) as error:
        model_dir.load(finished)
    assert f"tgen train --resume --out {finished}`" in error.value.hint
    assert isinstance(list(resume(finished, threads=1))[-1], DoneReport)
    assert contents(finished) == before


def test_resumed_run_reads_the_tokenizer_of_its_model_if_its_own_is_gone(finished):
    weights = (finished / "model.safetensors").read_bytes()
    (finished / "training/tokenizer.json").unlink()
    assert isinstance(list(resume(finished, threads=1))[-1], DoneReport)
    assert (finished / "model.safetensors").read_bytes() == weights
    for change in (lambda path: path.write_text("{}"), lambda path: path.unlink()):
        change(finished / "tokenizer.json")
        with pytest.raises(TrainingError, match=r"training/tokenizer\.json is missing"):
            list(resume(finished))


def test_run_without_its_record_is_not_taken_for_none(finished):
    (finished / "training/run.json").unlink()
    with pytest.raises(TrainingError, match=r"training/run\.json is missing") as error:
        list(resume(finished))
    assert f"--from {finished}" in error.value.hint


def test_model_of_the_best_step_is_written_again_in_the_middle_of_a_run(tmp_path):
    request_ = request(tmp_path, overrides={"learning_rate": "3", "matrix_learning_rate": "3"})
    calls = iter([False] * 12)
    list(runs.start(request_, stopped=lambda: next(calls, True)))
    out = tmp_path / "model"
    before = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()
    reports = resume(out, threads=1)
    next(report for report in reports if getattr(report, "phase", "") == "first step")
    reports.close()
    assert (out / "model.safetensors").read_bytes() == before
    with pytest.raises(UsageError, match="--from: the states of this run have all weights"):
        list(resume(out, start_from=out))
