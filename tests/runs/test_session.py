"""Starting and resuming runs: exact resume, saved weights, and the protection of existing files."""

import json
from itertools import cycle, repeat
from typing import get_args

import numpy as np
import pytest

from support.models import TEXT
from support.runs import (
    TRAINED,
    contents,
    dry_run,
    load_run,
    plan_of,
    progress,
    request,
    resume,
    start_run,
)
from tgen import corpus, runs
from tgen.checkpoint import model_dir
from tgen.config import Family
from tgen.config.training import TrainConfig
from tgen.corpus import TokenDataset
from tgen.errors import CorpusError, LockedError, TrainingError, UsageError
from tgen.model.transformer import Transformer
from tgen.reports.training import DoneReport, EvalReport, SampleReport, StepReport
from tgen.storage import locks
from tgen.training.evaluation import evaluate
from tgen.training.loss import LossModule


@pytest.mark.parametrize(
    ("family", "optimizer", "precision"),
    [
        *zip(get_args(Family), cycle(["muon", "adamw"]), repeat("float32")),
        ("qwen3", "muon", "bfloat16"),
        ("gpt2", "adamw", "bfloat16"),
    ],
)
def test_resumed_run_equals_uninterrupted_run(tmp_path, family, optimizer, precision):
    values = {"family": family, "overrides": {"optimizer": optimizer, "precision": precision}}
    list(runs.start(request(tmp_path, "whole", **values)))
    stops = iter([3, 5, 6, 11])  # before, at and after evaluations, more than once
    stop = next(stops)
    step = 0

    def stopped() -> bool:
        return step == stop

    reports = runs.start(request(tmp_path, "parts", **values), stopped=stopped)
    while True:
        last = None
        for last in reports:
            step = getattr(last, "step", step)
        assert isinstance(last, DoneReport)
        if last.finished:
            break
        assert last.step == stop
        stop = next(stops, -1)
        reports = resume(tmp_path / "parts", stopped=stopped, threads=1)
    parts = contents(tmp_path / "parts")
    for name, digest in contents(tmp_path / "whole").items():
        if "state-" not in name or "00000014" in name:
            assert parts[name] == digest, name
    assert progress(tmp_path / "parts") == progress(tmp_path / "whole")

    def log(out: str) -> list[tuple[object, ...]]:
        lines = (tmp_path / out / "training" / "log.jsonl").read_text().splitlines()
        reports = [json.loads(line) for line in lines]
        return [(r["kind"], r["step"], r.get("loss")) for r in reports if r["kind"] in TRAINED]

    assert log("parts") == log("whole")


def test_saved_weights_have_the_best_reported_loss(tmp_path):
    rising = {"learning_rate": "20", "warmup_steps": "13", "decay_fraction": "0"}  # soon too high
    wild = {"dropout": "0", "optimizer": "adamw", **rising}
    reports = list(runs.start(request(tmp_path, overrides=wild)))
    evaluations = [r for r in reports if isinstance(r, EvalReport)]
    best = min(evaluations, key=lambda r: r.bits_per_byte)
    assert [r.step for r in evaluations] == [5, 10, 14]
    assert best.step != 14  # otherwise the test proves nothing
    bundle = model_dir.load(tmp_path / "model")
    run, tokens = load_run(tmp_path / "model")
    store = TokenDataset(
        *corpus.tokens_of(tokens),
        batch_size=1,
        seed=0,
        val_bytes=run["held_out_bytes"],
        context_length=16,
    )
    _, bits, *_ = evaluate(LossModule(Transformer.from_arrays(bundle.config, bundle.arrays)), store)
    assert bits == pytest.approx(best.bits_per_byte, abs=1e-6)
    assert isinstance(reports[-1], DoneReport)
    assert reports[-1].best_bits_per_byte == best.bits_per_byte


def test_short_corpus_gets_a_shorter_context(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"to be or not to be. " * 4)
    plan = dry_run(request(tmp_path, overrides={"context_length": None}))
    assert plan.context_length == 9  # an eighth of 72 bytes to train on
    with pytest.raises(
        CorpusError, match=r"context_length=72 is longer than the corpus \(72 training tokens"
    ):
        list(runs.start(request(tmp_path, overrides={"context_length": "72"})))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "text", [b"ab" * 50, b"\xff\xfe\x00" * 30, "é".encode() * 90, b"x" * 90, b"\r\n.\r\n" * 18]
)
def test_any_bytes_can_be_trained_on(tmp_path, text):
    (tmp_path / "corpus.txt").write_bytes(text)
    short = {"train": TrainConfig(steps=5), "overrides": {"context_length": None}}
    reports = list(runs.start(request(tmp_path, **short)))
    assert isinstance(reports[-1], DoneReport)
    model_dir.load(tmp_path / "model")


@pytest.mark.parametrize(
    "text", [b"x" * 90 + b" " * 60, b"\n" * 80 + b"x", b'{"prompt": "", "completion": "ab"}\n' * 30]
)
def test_samples_work_with_any_prompt(tmp_path, text):
    name = "corpus.jsonl" if text.startswith(b"{") else "corpus.txt"
    (tmp_path / name).write_bytes(text)
    short = {"train": TrainConfig(steps=5), "corpus": [str(tmp_path / name)]}
    reports = list(runs.start(request(tmp_path, **short)))
    assert any(isinstance(report, SampleReport) for report in reports)


def test_last_weights_are_saved_without_a_validation_split(tmp_path):
    reports = runs.start(request(tmp_path, train=TrainConfig(steps=14, val_fraction=0)))
    for report in reports:
        if isinstance(report, StepReport) and report.step == 5:
            break
    assert progress(tmp_path / "model")["step"] == 5
    early = model_dir.load(tmp_path / "model")
    reports.close()
    list(resume(tmp_path / "model", threads=1))
    late = model_dir.load(tmp_path / "model")
    assert any(not np.array_equal(early.arrays[n], late.arrays[n]) for n in late.arrays)


def test_largest_seed_works(tmp_path):
    last = list(runs.start(request(tmp_path, train=TrainConfig(steps=1, seed=2**63 - 1))))[-1]
    assert isinstance(last, DoneReport)


def test_locked_run_refuses_writers_but_not_readers(finished):
    with locks.lock(finished / "training" / "LOCK"):
        with pytest.raises(LockedError, match="in use by process"):
            next(resume(finished))
        model_dir.load(finished)


FOREIGN = {  # directories of other programs, with names that runs and models use, too
    "logs": {"training/log.jsonl": "mine", "training/tensorboard/events": "mine"},
    "killed": {"training/tokenizer.json": "mine", "training/notes.txt": "mine"},
    "service": {"config.json": '{"port": 80}', "vocab.json": "{}", "merges.txt": "mine"},
    "weights": {"config.json": '{"port": 80}', "model.safetensors": "mine"},
}


def test_existing_files_are_not_overwritten(finished, tmp_path):
    before = contents(finished)
    with pytest.raises(UsageError, match="already contains a model"):
        next(runs.start(request(tmp_path)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="contains other files"):
        next(runs.start(request(tmp_path, "other", overwrite=True)))
    for name, files in FOREIGN.items():
        for file, content in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(content)
        with pytest.raises(UsageError, match="contains other files"):
            next(runs.start(request(tmp_path, name, overwrite=True)))
        assert {file: (tmp_path / name / file).read_text() for file in files} == files
    assert contents(finished) == before
    (finished / "notes.txt").write_text("mine")
    list(runs.start(request(tmp_path, overwrite=True, train=TrainConfig(steps=14, seed=1))))
    assert (finished / "notes.txt").read_text() == "mine"
    after = contents(finished)
    assert after["model.safetensors"] != before["model.safetensors"]


def test_old_model_stays_until_the_new_one_is_saved(finished, tmp_path):
    before = (finished / "model.safetensors").read_bytes()
    start_run(request(tmp_path, overwrite=True, overrides={"d_model": "32"}))
    assert (finished / "model.safetensors").read_bytes() == before
    assert model_dir.load(finished).config.d_model == 16
    list(resume(finished, threads=1))
    assert model_dir.load(finished).config.d_model == 32


def test_new_model_does_not_get_the_chat_template_of_the_old_one(finished, tmp_path):
    fresh = {path.name for path in finished.iterdir()}
    (finished / "chat_template.jinja").write_text("of a fine-tuned model")
    (finished / "notes.txt").write_text("mine")
    seeds = iter(range(2, 9))

    def anew():
        return request(tmp_path, overwrite=True, train=TrainConfig(steps=14, seed=next(seeds)))

    list(runs.start(anew()))
    assert {path.name for path in finished.iterdir()} == {*fresh, "notes.txt"}
    # A run that was stopped before it saved a model replaces the old one later.
    (finished / "chat_template.jinja").write_text("of a fine-tuned model")
    calls = iter([False, False])
    list(runs.start(anew(), stopped=lambda: next(calls, True)))
    assert (finished / "chat_template.jinja").exists()
    list(resume(finished, threads=1))
    assert {path.name for path in finished.iterdir()} == {*fresh, "notes.txt"}
    # What the user adds to this model stays.
    (finished / "chat_template.jinja").write_text("mine")
    list(resume(finished, settings={"steps": 20}, override=True, threads=1))
    assert (finished / "chat_template.jinja").read_text() == "mine"


def test_resume_refuses_a_changed_corpus(finished, tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT + b"more")
    with pytest.raises(TrainingError, match="has changed"):
        list(resume(finished, corpus=[str(tmp_path / "corpus.txt")]))
    with pytest.raises(TrainingError, match="no run"):
        next(resume(tmp_path / "nowhere"))


def test_held_out_rows_without_completions_are_noted(tmp_path):
    rows = [{"prompt": f"{i}?", "completion": f" {i * i}" * (i < 80)} for i in range(100)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = plan_of(runs.dry_run_reports(request(tmp_path, corpus=[str(path)])))
    assert "the held-out completions are empty: the last weights are saved" in plan.notes
