"""Runs repeated from their record: the same weights, or an error that says what has changed."""

import json
import os
import threading
from dataclasses import replace
from itertools import accumulate, chain
from itertools import repeat as repeat_number

import pytest

from support.models import TEXT
from support.runs import load_run, plan_of, progress, request, resume
from tgen import runs
from tgen.config.training import TrainConfig
from tgen.errors import CorpusError, TrainingError, UsageError
from tgen.reports.training import DoneReport, PlanReport
from tgen.runs import RunRequest
from tgen.training import loop

# Rates at which a run goes back to an earlier step and ends before its last one
EARLY = {"learning_rate": "0.3", "matrix_learning_rate": "0.3", "dropout": "0"}
EARLY |= {"patience": "1", "eval_every": "3"}


def repeat(folder, name="again", of="model", **values):
    return list(runs.start(RunRequest(out=folder / name, from_run=folder / of, **values)))


@pytest.fixture
def clock(monkeypatch):
    """A clock by which later steps take longer, so that a run ends earlier than it planned."""
    seconds = accumulate(chain(repeat_number(1.0, 100), repeat_number(4.0)))
    monkeypatch.setitem(loop.train.__kwdefaults__, "clock", lambda: next(seconds))


def weights(folder, name):
    return (folder / name / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"train": TrainConfig(minutes=3)},
        {"train": TrainConfig(steps=40), "overrides": EARLY},
        {"train": TrainConfig(steps=6, val_fraction=0), "ngrams": True},
    ],
    ids=["steps", "minutes", "early stopping", "nothing held out"],
)
@pytest.mark.usefixtures("clock")
def test_repeated_run_has_the_same_weights(tmp_path, values):
    *reports, done = runs.start(request(tmp_path, **values))
    assert done.step > 4
    if "train" in values and values["train"].steps is None:  # they became fewer in the decay
        assert len(progress(tmp_path / "model")["end_history"]) > 1
    assert done.stopped_early == ("patience" in values.get("overrides", {}))
    again = repeat(tmp_path)
    assert isinstance(done, DoneReport)
    assert isinstance(again[-1], DoneReport)
    assert weights(tmp_path, "again") == weights(tmp_path, "model")
    assert again[-1].best_bits_per_byte == done.best_bits_per_byte
    assert plan_of(again).notes == plan_of(reports).notes
    assert again[-1].step == done.step
    assert load_run(tmp_path / "again")[0]["plan"]["train"]["steps"] is not None
    assert repeat(tmp_path, "third", of="again")
    assert weights(tmp_path, "third") == weights(tmp_path, "model")


@pytest.mark.parametrize("n_pieces", [1, 64])  # 1 as in older versions
def test_repeated_run_reads_the_same_part_of_a_large_text(tmp_path, monkeypatch, n_pieces):
    monkeypatch.setattr("tgen.planning.plan._MIN_CORPUS_BYTES", 1)  # two steps read 6 KB
    monkeypatch.setattr("tgen.corpus.split._MIN_PIECE", 100)
    (tmp_path / "corpus.txt").write_bytes(b"".join(b"line %d\n" % i for i in range(4_000)))
    with monkeypatch.context() as patch:
        patch.setattr("tgen.corpus.PIECES", n_pieces)
        patch.setattr("tgen.corpus.MAX_VAL_BYTES", 800)
        values = {"train": TrainConfig(steps=2), "tokenizer": "char"}
        reports = list(runs.start(request(tmp_path, **values)))
    plan = plan_of(reports)
    assert any("an evenly spaced sample of " in note for note in plan.notes)
    assert plan.train_tokens < 7_000
    assert plan.held_out_tokens < 1_000
    repeat(tmp_path)
    assert weights(tmp_path, "again") == weights(tmp_path, "model")


@pytest.mark.usefixtures("clock")
def test_repeated_run_resumes_to_the_same_weights(tmp_path):
    list(runs.start(request(tmp_path, train=TrainConfig(minutes=3))))
    stops = iter([False, True])
    again = RunRequest(out=tmp_path / "again", from_run=tmp_path / "model")
    done = list(runs.start(again, stopped=lambda: next(stops)))[-1]
    assert not done.finished
    list(resume(tmp_path / "again"))
    assert weights(tmp_path, "again") == weights(tmp_path, "model")


def test_record_names_versions_and_cpu(tmp_path):
    list(runs.start(request(tmp_path)))
    record = load_run(tmp_path / "model")[0]
    assert len(record["corpus_sha256"]) == len(record["tokenizer_sha256"]) == 64
    environment = record["environment"]
    assert {"tgen", "torch", "numpy", "python", "threads", "processor", "cpu", "cpu_flags"} <= {
        name for name, value in environment.items() if value != ""
    }


def test_hint_on_an_unreadable_corpus_that_is_there_is_its_own(tmp_path):
    list(runs.start(request(tmp_path)))
    (tmp_path / "corpus.txt").write_bytes(b"")
    with pytest.raises(CorpusError, match="is empty") as error:
        repeat(tmp_path)
    assert error.value.hint == "name a file with text"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_unchanged_copy_may_be_a_pipe(tmp_path):
    list(runs.start(request(tmp_path)))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_bytes, args=[TEXT], daemon=True).start()
    repeat(tmp_path, corpus=[str(pipe)])
    assert weights(tmp_path, "again") == weights(tmp_path, "model")


def test_changed_corpus_is_refused_and_an_unchanged_copy_is_not(tmp_path):
    list(runs.start(request(tmp_path)))
    (tmp_path / "corpus.txt").write_bytes(TEXT + b"more")
    with pytest.raises(TrainingError, match=r"corpus has changed since the run") as error:
        repeat(tmp_path)
    assert "name an unchanged copy" in error.value.hint
    assert not (tmp_path / "again").exists()
    (tmp_path / "copy.txt").write_bytes(TEXT)
    repeat(tmp_path, corpus=[str(tmp_path / "copy.txt")])
    assert weights(tmp_path, "again") == weights(tmp_path, "model")
    (tmp_path / "corpus.txt").unlink()
    with pytest.raises(CorpusError, match="does not exist") as missing:
        repeat(tmp_path, "third")
    assert missing.value.hint == error.value.hint


def test_run_that_cannot_be_repeated_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="contains no run"):
        repeat(tmp_path)
    long = request(tmp_path, train=TrainConfig(minutes=50))
    list(runs.start(long, stopped=lambda: True))
    with pytest.raises(TrainingError, match="has not ended"):
        repeat(tmp_path)
    list(resume(tmp_path / "model", settings={"steps": 60}, override=True))
    with pytest.raises(
        TrainingError, match="its settings were changed from step 1: steps unset -> 60"
    ):
        repeat(tmp_path)


def test_skipped_files_are_named_again(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(TEXT)
    (tmp_path / "texts" / "b.bin").write_bytes(b"\0" * 99)
    skipped = f"skipped {tmp_path / 'texts' / 'b.bin'}: binary data with NUL bytes"
    first = list(runs.start(request(tmp_path, corpus=[str(tmp_path / "texts")])))
    assert skipped in plan_of(first).notes
    assert skipped in plan_of(repeat(tmp_path)).notes


def test_other_environment_is_a_note(tmp_path):
    list(runs.start(request(tmp_path)))
    (plan,) = [r for r in repeat(tmp_path, threads=2) if isinstance(r, PlanReport)]
    assert "threads was 1, now 2" in plan.notes[-1]


def test_fine_tuning_is_repeated_from_the_same_model_only(tmp_path):
    list(runs.start(request(tmp_path, "base")))
    tuned = request(tmp_path, start_from=tmp_path / "base")
    tuned = replace(tuned, overrides={"batch_size": "4"}, train=TrainConfig(steps=4))
    list(runs.start(tuned))
    repeat(tmp_path)
    assert weights(tmp_path, "again") == weights(tmp_path, "model")
    lora = replace(tuned, out=tmp_path / "lora", train=TrainConfig(steps=4, lora=2))
    list(runs.start(lora))
    repeat(tmp_path, "lora again", of="lora")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("lora", "lora again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    list(runs.start(request(tmp_path, "base", overwrite=True, train=TrainConfig(steps=2))))
    with pytest.raises(TrainingError, match="has changed since"):
        repeat(tmp_path, "third")
    with pytest.raises(TrainingError, match=r"base model .* has changed"):
        repeat(tmp_path, "fourth", of="lora")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(TrainingError, match="that the run started from is missing"):
        repeat(tmp_path, "fifth")


def test_the_repeated_run_is_not_replaced(tmp_path):
    list(runs.start(request(tmp_path)))
    with pytest.raises(UsageError, match="this run starts from it"):
        repeat(tmp_path, "model", overwrite=True)
    record = tmp_path / "model" / "training" / "run.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "plan": {}}))
    with pytest.raises(TrainingError, match="damaged"):
        repeat(tmp_path)
