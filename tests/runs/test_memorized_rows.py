"""Few rows are memorized: nothing is held out, and the run ends once all are exact."""

import json
from itertools import pairwise

import numpy as np
import pytest

from support.runs import contents, dry_run, load_run, plan_of, progress, request, resume
from tgen import corpus, runs
from tgen.config.training import TrainConfig
from tgen.reports.training import AnswersReport, DoneReport, MemorizationReport
from tgen.runs.tokenizing import hold_out, row_lengths
from tgen.storage import disk_array

ROWS = [("what is statquest", "awesome"), ("statquest is what", "awesome"), ("who", "you are")]
# Wide enough to learn three answers in few steps.
WIDE = {"d_model": "32", "batch_size": None, "context_length": None, "eval_every": "10"}


@pytest.fixture
def make_request(tmp_path):
    """Return a function that makes the request for a run on three rows."""
    rows = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in ROWS]
    (tmp_path / "qa.jsonl").write_text("\n".join(rows))

    def make(name, *, overrides=None, **train):
        path = str(tmp_path / "qa.jsonl")
        config = TrainConfig(**{"steps": 400} | train)
        overrides = WIDE | {"dropout": None} | (overrides or {})
        return request(tmp_path, name, corpus=[path], train=config, overrides=overrides)

    return make


def test_run_ends_once_all_answers_are_exact_twice_in_a_row_also_if_resumed(make_request, tmp_path):
    reports = list(runs.start(make_request("whole")))
    checks = [report for report in reports if isinstance(report, AnswersReport)]
    assert [check.n_exact for check in checks[-2:]] == [3, 3]
    assert all(a.n_exact < 3 or b.n_exact < 3 for a, b in pairwise(checks[:-1]))
    done = reports[-1]
    assert isinstance(done, DoneReport)
    assert done.learned
    assert done.finished
    assert done.step == checks[-1].step < 400
    (memory,) = (r for r in reports if isinstance(r, MemorizationReport))
    assert memory.natural_run_bytes is None  # rows have no end of the text
    assert "end of the text" not in memory.verdict
    plan = plan_of(reports)
    assert plan.held_out_tokens == 0
    assert any(choice.why.startswith("training ends once 3 answers") for choice in plan.choices)
    assert any(note.startswith("too few rows to hold any out (3 rows)") for note in plan.notes)
    stop_at = checks[-1].step - 5  # between the two evaluations
    steps = iter(range(1, 401))
    list(runs.start(make_request("parts"), stopped=lambda: next(steps) >= stop_at))
    assert progress(tmp_path / "parts")["exact_evals"] == 1
    list(resume(tmp_path / "parts"))
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    newest = f"training/state-{done.step:08d}/state.safetensors"
    assert [parts[name] for name in ("model.safetensors", newest)] == [
        whole[name] for name in ("model.safetensors", newest)
    ]
    assert progress(tmp_path / "parts") == progress(tmp_path / "whole")


def test_windows_are_at_least_as_long_as_the_longest_row(make_request, tmp_path):
    plan = dry_run(make_request("plan"))
    assert plan.context_length >= max(len(prompt + text) + 1 for prompt, text in ROWS)
    long = {"prompt": "q " * 500, "completion": "a " * 100}
    with (tmp_path / "qa.jsonl").open("a") as file:
        file.write("\n" + json.dumps(long))
    plan = dry_run(make_request("plan"))
    assert plan.context_length == 1201
    assert any(choice.why == "the longest row" for choice in plan.choices)


def test_lengths_of_rows_are_read_in_blocks(tokenizer, monkeypatch):
    monkeypatch.setattr(disk_array, "_BLOCK", 8)
    end, random = tokenizer.end_of_text, np.random.default_rng(0)
    lengths, masked = random.integers(1, 20, 40), random.random(40) < 0.3
    text = np.concatenate([[1] * (n - 1) + [end] for n in lengths]).astype(np.uint16)
    mask = np.concatenate([[m] + [True] * (n - 1) for n, m in zip(lengths, masked, strict=True)])
    reads = []

    class Mask(np.ndarray):
        def __getitem__(self, key):
            reads.append(key)
            return np.asarray(self)[key]

    found, are_all = row_lengths(corpus.Tokens(text, mask.view(Mask)), tokenizer)
    assert found.tolist() == lengths[~masked].tolist()
    assert not are_all
    assert len(reads) == -(-len(mask) // 8)


def test_rows_are_held_out_if_there_are_many_or_the_user_says_so(make_request, tmp_path):
    assert dry_run(make_request("plan", val_fraction=0.4)).held_out_tokens > 0
    many = [json.dumps({"prompt": f"p{i}", "completion": f"c{i}"}) for i in range(100)]
    (tmp_path / "qa.jsonl").write_text("\n".join(many))
    assert dry_run(make_request("plan")).held_out_tokens > 0
    texts = [json.dumps({"prompt": "p" * 900, "completion": f"c{i}"}) for i in range(50)]
    (tmp_path / "qa.jsonl").write_text("\n".join(texts))  # few, but not short
    assert dry_run(make_request("plan")).held_out_tokens > 0


def test_a_run_without_the_record_of_an_ending_trains_on_windows_of_a_stream(
    make_request, tmp_path
):
    list(runs.start(make_request("short", steps=4, overrides={"eval_every": "2"})))
    record, _ = load_run(tmp_path / "short")
    assert record["plan"]["ends_when_learned"]
    path = tmp_path / "short" / "training" / "run.json"
    values = json.loads(path.read_text())
    del values["plan"]["ends_when_learned"]
    path.write_text(json.dumps(values))
    reports = list(resume(tmp_path / "short", settings={"steps": 8}, override=True))
    assert not any(isinstance(report, AnswersReport) for report in reports)


def test_the_fraction_of_texts_never_changes(tmp_path):
    rows = {"a.txt": "a text", "a.jsonl": '{"text": "a"}\n{"prompt": "p", "completion": "c"}'}
    for name, content in rows.items():
        (tmp_path / name).write_text(content)
        text = corpus.read([str(tmp_path / name)])
        assert hold_out(text, TrainConfig()) == (TrainConfig(), [])
