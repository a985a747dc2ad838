"""Fine-tuning on conversations: from rows to a model that answers."""

# ruff: noqa: F811  # fixtures are imported

import json
import logging
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
import torch

from support.chats import (
    CHATML,
    DATED,
    GEMMA,
    OWN_SYSTEM,
    QWEN3,
    assistant,
    model,  # noqa: F401
    plain_model,  # noqa: F401
    user,
)
from support.runs import contents, dry_run, load_run, resume
from support.runs import plan_of as planned
from tgen import load, runs
from tgen.chat.encode import MAX_CHARACTERS
from tgen.checkpoint import export, safetensors_file
from tgen.cli.app import run
from tgen.config.training import TrainConfig
from tgen.errors import CorpusError, ModelError, TrainingError, UsageError
from tgen.lora import model_with_adapter
from tgen.reports.training import DoneReport, MemorizationReport, SampleReport
from tgen.runs import RunRequest, chat_rows, prepare

ROWS = [[*user(f"What is {i}?"), assistant(f"It is {i}.")] for i in range(40)]


def write(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)


def request(folder, source, rows=ROWS, *, steps=6, **values):
    overrides = {"eval_every": "3", "batch_size": "2"} | values.pop("overrides", {})
    defaults = {
        "corpus": [rows if isinstance(rows, str) else write(folder, rows)],
        "out": folder / "tuned",
        "start_from": source,
        "train": TrainConfig(steps=steps),
        "overrides": overrides,
        "threads": 1,
    }
    return RunRequest(**defaults | values)


def plan_of(one):
    return dry_run(one)


@pytest.fixture(autouse=True)
def _known_speed(monkeypatch):
    """Skip the measurement of the machine's speed, which takes most of a plan's time."""
    monkeypatch.setattr(prepare, "measure_speed", lambda *_, **__: 1e11)


@pytest.fixture
def no_warnings():
    """Fail if transformers logs a warning."""
    transformers = pytest.importorskip("transformers")
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    yield transformers
    logger.removeHandler(handler)
    assert not warnings


def test_written_model_is_its_source_but_for_weights_and_the_end_of_an_answer(
    model, tmp_path, no_warnings
):
    source = model(CHATML)
    (source / "special_tokens_map.json").write_text('{"unk_token": "<s>"}')
    reports = list(runs.start(request(tmp_path, source)))
    assert isinstance(reports[-1], DoneReport)
    assert not any(isinstance(one, MemorizationReport) for one in reports)
    (sample, *_) = [one for one in reports if isinstance(one, SampleReport)]
    assert sample.prompt.startswith(b"What is ")
    out, changed = tmp_path / "tuned", {"generation_config.json", "model.safetensors"}
    names = {path.name for path in source.iterdir() if path.is_file()} - {"rows.jsonl"}
    assert {path.name for path in out.iterdir() if path.is_file()} == names | {"README.md"}
    for name in names - changed:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    old, new = (json.loads((path / "generation_config.json").read_text()) for path in (source, out))
    end = model_with_adapter.load(out).tokenizer.added_tokens["<|im_end|>"]
    assert new == old | {"eos_token_id": [old["eos_token_id"], end]}
    assert end in model_with_adapter.load(out).end_ids
    no_warnings.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = no_warnings.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.eos_token == "</s>"


def test_model_that_knows_its_rows_answers_and_stops(model, tmp_path):
    rows = [
        [*user("Who?"), assistant("The king."), *user("Why?"), assistant("Born so.")],
        [*user("What?"), assistant("A crown.")],
    ]
    source = model(CHATML, pad_token="<|im_end|>")
    overrides = {"eval_every": "100", "learning_rate": "0.01", "matrix_learning_rate": "0.03"}
    list(runs.start(request(tmp_path, source, rows, steps=80, overrides=overrides)))
    tuned = load(tmp_path / "tuned", threads=1)
    how = {"temperature": 0, "max_new_tokens": 30}
    assert tuned.chat(user("What?"), **how) == "A crown."
    asked = [*user("Who?"), assistant("The king."), *user("Why?")]
    assert tuned.chat(asked, **how) == "Born so."
    # transformers, which knows only generation_config.json, stops as well.
    theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tuned.path)
    ids = tuned._loaded.chat_format.encode(user("What?"))
    generated = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=30)
    end = tuned.tokenizer.added_tokens["<|im_end|>"]
    assert generated[0].tolist() == [*ids, *tuned.tokenizer.encode(b"A crown."), end]


def test_plain_template_is_written_into_the_model(plain_model, tmp_path):
    rows = [[{"role": "system", "content": "Be brief."}, *user("What?"), assistant("A crown.")]] * 2
    with pytest.raises(ModelError, match="has no usable chat template") as error:
        plan_of(request(tmp_path, plain_model, rows))
    assert "--template plain" in error.value.hint
    overrides = {"eval_every": "100", "learning_rate": "0.01", "matrix_learning_rate": "0.03"}
    one = request(tmp_path, plain_model, rows, steps=60, overrides=overrides, template="plain")
    list(runs.start(one))
    tuned = load(tmp_path / "tuned", threads=1)
    asked = rows[0][:2]
    assert tuned.chat(asked, temperature=0, max_new_tokens=30) == " A crown."
    ids = tuned._loaded.chat_format.encode(asked)
    assert tuned.tokenizer.decode(ids) == b"Be brief.\nQ: What?\nA:"
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "tuned" / name).read_bytes() == (plain_model / name).read_bytes()


def test_another_template_replaces_that_of_the_model(model, tmp_path):
    (tmp_path / "files").mkdir()
    template = tmp_path / "files" / "own.jinja"
    template.write_text(OWN_SYSTEM)
    source = model(CHATML)
    list(runs.start(request(tmp_path / "files", source, steps=2, template=str(template))))
    out = tmp_path / "files" / "tuned"
    assert (out / "chat_template.jinja").read_text() == OWN_SYSTEM
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    with pytest.raises(UsageError, match="--template"):
        plan_of(request(tmp_path, source, template=str(tmp_path / "missing")))
    (tmp_path / "text.txt").write_text("to be or not to be")
    with pytest.raises(UsageError, match="--template needs rows of messages"):
        plan_of(request(tmp_path, source, str(tmp_path / "text.txt"), template="plain"))


def test_dtype_is_that_of_the_source(model, tmp_path):
    bundle, source = model_with_adapter.load(model(CHATML)), tmp_path / "half"
    export.export_transformers(
        bundle, source, stored="bf16", max_shard_bytes=1 << 30, progress=lambda _: None
    )
    list(runs.start(request(tmp_path, source, steps=2)))
    header = safetensors_file.read_header(tmp_path / "tuned" / "model.safetensors")
    assert {entry.dtype for entry in header.values()} == {"BF16"}
    assert (tmp_path / "tuned" / "config.json").read_bytes() == (
        source / "config.json"
    ).read_bytes()
    assert load(tmp_path / "tuned", threads=1).chat(user("a"), max_new_tokens=1) is not None


class LongAgo(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime(2020, 2, 3, tzinfo=tz)


def test_resumed_run_equals_the_whole_one_days_later(model, tmp_path, monkeypatch):
    source = model(DATED)
    stop = iter([False] * 2 + [True])
    with monkeypatch.context() as patch:
        patch.setattr(chat_rows, "datetime", LongAgo)
        list(runs.start(request(tmp_path, source, out=tmp_path / "whole")))
        parts = request(tmp_path, source, out=tmp_path / "parts")
        list(runs.start(parts, stopped=lambda: next(stop)))
    record, tokens = load_run(tmp_path / "parts")
    assert record["chat"]["date"].startswith("2020-02-03")
    text = load(source, threads=1).tokenizer.decode(tokens["train"])
    assert b"It is 03 February 2020." in text
    # The tokens are lost: they are made again from the corpus, with the date of the run.
    path = tmp_path / "parts" / "training" / "tokens.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for name in ("config.json", "generation_config.json"):
        (source / name).unlink()
    reports = list(resume(tmp_path / "parts", corpus=[str(tmp_path / "rows.jsonl")], threads=1))
    whole = resume(tmp_path / "whole", threads=1)
    assert planned(reports).rows == planned(whole).rows
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_resumed_run_may_get_other_conversations_but_no_text(model, tmp_path):
    source = model(CHATML)
    stop = iter([False] * 2 + [True])
    list(runs.start(request(tmp_path, source), stopped=lambda: next(stop)))
    more = write(tmp_path, [*ROWS, [*user("New?"), assistant("Yes.")] * 9], "more.jsonl")
    with pytest.raises(TrainingError, match="the corpus has changed"):
        list(resume(tmp_path / "tuned", corpus=[more]))
    (tmp_path / "text.txt").write_text("to be or not to be")
    reports = list(resume(tmp_path / "tuned", corpus=[more], override=True, threads=1))
    assert isinstance(reports[-1], DoneReport)
    assert load_run(tmp_path / "tuned")[0]["chat"]["n_rows"] == 33


def test_plan_says_what_becomes_of_the_rows(model, tmp_path, capsysbinary):
    long = [*user("a"), assistant("b"), *user("c" * 900), assistant("d")]
    none = [*user("c" * 900), assistant("d")]
    rows = [*ROWS, long, none]
    plan = plan_of(request(tmp_path, model(OWN_SYSTEM), rows))
    assert plan.rows
    assert plan.rows.held_out_rows == 8
    assert plan.rows.rows == 42 - 8 - (any("left out" in note for note in plan.notes))
    text = " ".join(plan.notes)
    assert "1 row loses its last answers, too long for a context of 256 tokens: " in text
    assert "rows.jsonl, line 41" in text
    assert "rows.jsonl, line 42" in text
    assert "adds a system message of its own: 'You are kind.'" in text
    first = plan.rows.first_row
    assert [part.in_loss for part in first] == [False, True]
    start = "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nWhat is "
    assert first[0].text.startswith(start)
    assert first[1].text.startswith("It is ")
    assert first[1].text.endswith("<|im_end|>")
    assert plan.context_length == 64  # as long as the longest row
    thinking = plan_of(request(tmp_path, model(QWEN3), [[*ROWS[0], *ROWS[1]]]))
    assert "the chat template rewrites earlier turns: 1 rows are 2 examples" in thinking.notes
    dated = plan_of(request(tmp_path, model(DATED)))
    assert any(note.startswith("the chat template writes the date") for note in dated.notes)
    # The command shows the same.
    options = ["--steps", "2", "--dry-run", "--set", "batch_size=2"]
    assert run(["train", str(tmp_path / "rows.jsonl"), "--from", str(model(CHATML)), *options]) == 0
    shown = capsysbinary.readouterr().out.decode()
    assert (
        "first row:\n<|im_start|>user\nWhat is 0?<|im_end|>\n<|im_start|>assistant\n{+It" in shown
    )
    assert ".<|im_end|>+}" in shown


@pytest.mark.parametrize("at", [0, 5])
def test_row_of_any_length_is_left_out(model, tmp_path, at):
    n = MAX_CHARACTERS + 10
    huge = [*user("c" * n), assistant("d")]
    answer = [*user("a"), assistant("b" * n)]
    rows = [*ROWS[:at], huge, answer, *ROWS[at:]]
    source = model(CHATML)
    one = request(tmp_path, source, rows)
    one = replace(one, train=TrainConfig(steps=1 << 20, val_fraction=0.0))
    text = " ".join(plan_of(one).notes)
    assert "2 rows are left out, too long for a context of 256 tokens: " in text
    assert f"rows.jsonl, line {at + 1}" in text


def test_rows_that_cannot_be_learned_are_refused(model, tmp_path):
    source = model(GEMMA)
    system = [{"role": "system", "content": "x"}, *ROWS[0]]
    with pytest.raises(
        CorpusError, match=r"rows\.jsonl, line 21: the chat template rejects the me"
    ):
        plan_of(request(tmp_path, source, [*ROWS[:20], system]))
    with pytest.raises(CorpusError, match=r"no row fits into a context of 256 tokens .*line \d"):
        plan_of(
            request(tmp_path, source, [[*user("c" * 900 + str(i)), ROWS[0][1]] for i in range(3)])
        )
    with pytest.raises(UsageError, match="bpe_dropout cannot be combined with conversations"):
        plan_of(request(tmp_path, source, overrides={"bpe_dropout": "0.1"}))


def test_new_model_learns_conversations_with_the_plain_template(tmp_path):
    plan = plan_of(request(tmp_path, None))
    question, answer = (message["content"] for message in ROWS[0])
    (context, asked), (learned, in_loss) = [
        (part.text, part.in_loss) for part in plan.rows.first_row
    ]
    assert context.startswith("Q: ")
    assert context.endswith("\nA:")
    assert learned.endswith("<|endoftext|>")
    assert (asked, in_loss) == (False, True)
    assert len(question) > 0 < len(answer)
    assert plan.tokenizer in ("char", "bpe")


def test_prompts_and_completions_are_chats_if_asked(model, tmp_path):
    rows = [{"prompt": row[0]["content"], "completion": row[1]["content"]} for row in ROWS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, source = str(tmp_path / "pairs.jsonl"), model(CHATML)
    plain = plan_of(request(tmp_path, source, pairs))
    assert plain.rows is None
    assert (
        plan_of(request(tmp_path, source, pairs, chat=True)).rows
        == plan_of(request(tmp_path, source)).rows
    )


def test_loss_may_be_on_all_tokens(model, tmp_path):
    one = request(tmp_path, model(CHATML), steps=1, overrides={"loss_on": "all"})
    list(runs.start(one))
    tokens = load_run(tmp_path / "tuned")[1]
    starts = np.cumsum([0, *tokens["train_lengths"][:-1]])
    assert np.flatnonzero(~tokens["train_loss_mask"]).tolist() == starts.tolist()


def test_continued_text_begins_where_the_tokenizer_says(model, tmp_path):
    source = model(CHATML)
    described = json.loads((source / "tokenizer.json").read_text())
    begin = model_with_adapter.load(source).tokenizer.added_tokens["<s>"]
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [begin], "tokens": ["<s>"]}},
    }
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"The king said {i}. " * (1 + i)}) + "\n" for i in range(20))
    )
    list(runs.start(request(tmp_path, source, str(tmp_path / "text.jsonl"), steps=2)))
    record, tokens = load_run(tmp_path / "tuned")
    tokenizer = model_with_adapter.load(tmp_path / "tuned").tokenizer
    for ids in (tokens["train"], tokens["val"]):
        starts = np.flatnonzero(ids == begin)
        ends = np.flatnonzero(ids == tokenizer.end_of_text)
        assert starts.tolist() == [0, *(ends[:-1] + 1).tolist()]
    assert record["begin_of_text"] == begin
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "tuned" / name).read_bytes() == (source / name).read_bytes(), name


def test_rows_of_messages_are_answered(model, tmp_path, capsysbinary):
    source = model(CHATML)
    rows = [
        {"messages": [*user("Who?"), assistant("I.") | {"weight": 0}, *user("You?")], "id": 1},
        {"messages": ROWS[0]},
        {"messages": user("a"), "prompt": "b"},
        {"messages": [{"role": "user"}]},
        {"messages": user("Who?"), "echo": True},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["generate", "-m", str(source), "--input", str(tmp_path / "in.jsonl"), "--jsonl"]
    assert run([*command, "-n", "3", "--temperature", "0", "-q"]) == 1
    records = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    asked = [*user("Who?"), assistant("I."), *user("You?")]
    expected = load(source, threads=1).chat(asked, temperature=0, max_new_tokens=3)
    assert records[0]["text"] == expected
    assert (records[0]["id"], records[0]["prompt"]) == (1, "You?")
    messages = [one["error"]["message"] for one in records[1:]]
    assert messages[0].startswith("messages: the last one is of the assistant")
    assert messages[1] == "messages and prompt are both given"
    assert messages[2].startswith("messages[0]: invalid value")
    assert messages[3] == "echo cannot be combined with messages"


def test_continued_adapter_keeps_its_template(plain_model, tmp_path):
    """The base model has no template, and does not name the end of an answer."""
    rows = [[*user("What?"), assistant("A crown.")]] * 2
    template = tmp_path / "chatml.jinja"
    template.write_text(CHATML)
    first = request(tmp_path, plain_model, rows, template=str(template), out=tmp_path / "first")
    list(runs.start(replace(first, train=TrainConfig(steps=2, lora=4))))
    second = replace(first, start_from=None, template=None, adapter=tmp_path / "first")
    list(runs.start(replace(second, out=tmp_path / "second", train=TrainConfig(steps=2))))
    names = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
    for name in names:
        texts = [(tmp_path / run / name).read_bytes() for run in ("first", "second")]
        assert texts[0] == texts[1], name
    end = load(plain_model, threads=1).tokenizer.added_tokens["<|im_end|>"]
    assert end in model_with_adapter.load(tmp_path / "second").end_ids
