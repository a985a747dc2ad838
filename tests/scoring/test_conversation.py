"""Scores of conversations: the validation loss of a run on the same rows."""

# ruff: noqa: F811  # fixtures are imported

import json

import pytest

from support.adapters import save_adapter
from support.chats import (
    CHATML,
    MISTRAL,
    QWEN3,
    assistant,
    model,  # noqa: F401
    plain_model,  # noqa: F401
    user,
)
from tgen import corpus, runs
from tgen.cli.app import run
from tgen.config.training import TrainConfig
from tgen.reports.training import DoneReport
from tgen.runs import RunRequest, prepare

ROWS = [
    [*user(f"What is {i}?"), assistant(f"It is {i}."), *user("Why?"), assistant(f"So {i * i}.")]
    for i in range(40)
]


def write(path, rows):
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def score(capsysbinary):
    """Run `tgen score` in this process; return its status, the last JSON object, and stderr."""

    def run_score(model, *arguments):
        flags = ["-m", model, "--threads", "1", "--json", *arguments]
        status = run(["score", *map(str, flags)])
        out, err = capsysbinary.readouterr()
        return status, json.loads(out.splitlines()[-1]) if out else None, err.decode()

    return run_score


@pytest.mark.parametrize("template", [CHATML, QWEN3])  # QWEN3 makes an example of each answer
def test_score_is_the_validation_loss_of_a_run(template, model, score, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "measure_speed", lambda *_, **__: 1e11)
    path = write(tmp_path / "rows.jsonl", ROWS)
    request = RunRequest(
        corpus=[path],
        out=tmp_path / "tuned",
        start_from=model(template),
        train=TrainConfig(steps=4),
        overrides={"eval_every": "2", "batch_size": "2"},
        threads=1,
    )
    *_, done = runs.start(request)
    assert isinstance(done, DoneReport)
    val = corpus.split_rows(corpus.read([path]), TrainConfig().val_fraction)[1]
    held_out = [json.loads(row[:])["messages"] for (row,) in val]
    status, total, err = score(tmp_path / "tuned", write(tmp_path / "val.jsonl", held_out))
    assert status == 0, err
    assert total["n_documents"] == len(held_out)
    assert total["n_cut"] == 0
    assert total["bits_per_byte"] == pytest.approx(done.best_bits_per_byte, abs=1e-5)


def test_answers_are_scored_and_long_rows_are_cut(model, score, tmp_path):
    long = [*ROWS[0], *user("Who? " * 200), assistant("I.")]
    path = write(tmp_path / "rows.jsonl", [ROWS[0], long, [*user("a" * 9000), assistant("b")]])
    status, total, err = score(model(CHATML), path)
    assert status == 0, err
    assert total["n_cut"] == 2
    assert "warning: some answers of 2 rows are not scored: too long for the context" in err
    assert total["n_bytes"] == 2 * len("It is 0.So 0.")
    assert "scores the answers of conversations" in err


def test_two_models_are_compared_on_their_answers(model, score, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS[:12])
    base = model(CHATML)
    adapter = save_adapter(tmp_path / "kb", base)
    status, total, err = score(base, path, "--compare", adapter)
    assert status == 0, err
    assert (total["model"], total["compare"]["model"]) == (str(base), str(adapter))
    assert total["other"]["bits_per_byte"] == score(adapter, path)[1]["bits_per_byte"]
    assert total["difference"]["bits_per_byte"] != 0
    other = save_adapter(
        tmp_path / "other", base, template=CHATML.replace("+ m['con", "+ 'A' + m['con")
    )
    status, _, err = score(base, path, "--compare", other)
    assert status == 2
    assert "their chat templates differ" in err


def test_what_cannot_be_scored_is_one_clear_error(plain_model, model, score, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS[:2])
    status, _, err = score(plain_model, path)
    assert status == 1
    assert err.endswith(
        f"error: '{plain_model}' has no chat template\n"
        'hint: choose a model with a chat template, or write {"text": "..."} rows\n'
    )
    chat = model(MISTRAL)
    (tmp_path / "plain.txt").write_text("What is a crown?")
    status, _, err = score(chat, path, tmp_path / "plain.txt")
    assert status == 1
    assert "plain.txt has not" in err
    assert "hint: score one after the other" in err
    rows = [[*user("a"), {"role": "tool", "content": "1"}, assistant("b")]]
    status, _, err = score(chat, write(tmp_path / "tool.jsonl", [ROWS[0], *rows]))
    assert status == 1
    assert "tool.jsonl, line 2: the chat template rejects" in err
    assert "--template" not in err
