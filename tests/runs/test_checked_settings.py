"""A refused resume leaves the run as it was; a resume makes the checks of a start."""

import json
import shutil

import pytest

from support.runs import load_run, request, resume, start_run
from tgen import runs
from tgen.config.training import ResolvedTrainConfig, TrainConfig
from tgen.corpus import PackedRows, TokenDataset
from tgen.errors import UsageError


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stop_after(n):
    """Return a function that asks a run to stop after `n` steps."""
    stops = iter([False] * (n - 1) + [True])
    return lambda: next(stops)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A folder with two runs of five steps: `model`, and `chat`, which fine-tunes it."""
    folder = tmp_path_factory.mktemp("started")
    options = {"tokenizer": "bpe", "vocab_size": 300, "overrides": {"context_length": "64"}}
    list(runs.start(request(folder, **options), stopped=stop_after(5)))
    rows = [{"prompt": f"Who is {i}?", "completion": f"It is {i}!"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = dict.fromkeys(("d_model", "n_layers", "n_heads", "context_length", "dropout"))
    corpus = [str(folder / "rows.jsonl")]
    options = {"corpus": corpus, "start_from": folder / "model", "chat": True, "overrides": shape}
    list(runs.start(request(folder, "chat", template="plain", **options), stopped=stop_after(5)))
    return folder


@pytest.fixture
def text_run(started, tmp_path):
    shutil.copytree(started, tmp_path, dirs_exist_ok=True)
    return tmp_path / "model"


@pytest.fixture
def chat_run(text_run):
    return text_run.with_name("chat")


REFUSED = [
    ("chat", {"overrides": {"bpe_dropout": "0.2"}}),
    ("text", {"overrides": {"max_steps": "9"}}),
    ("text", {"overrides": {"warmup_steps": "1000"}}),
    ("text", {"overrides": {"bpe_dropout": "0.2", "max_steps": "9"}, "settings": {"steps": 40}}),
    ("text", {"overrides": {"batch_size": "1000000000"}}),
    ("text", {"overrides": {"eval_every": str(2**70)}}),
    ("text", {"overrides": {"accumulation": "9"}}),
    ("text", {"settings": {"steps": "many"}}),
    ("text", {"settings": {"learning_rate": None}}),
    ("text", {"settings": {"bigram_start": "x"}}),
]


@pytest.mark.parametrize(("kind", "options"), REFUSED)
def test_refused_resume_changes_no_file(kind, options, text_run, chat_run, tmp_path):
    out = {"text": text_run, "chat": chat_run}[kind]
    (tmp_path / "other.txt").write_text("Another text, which would be tokenized.\n" * 99)
    before = files(out)
    for corpus in [[], [str(tmp_path / "other.txt")]] if kind == "text" else [[]]:
        with pytest.raises(UsageError) as error:
            list(resume(out, override=True, threads=1, corpus=corpus, **options))
        assert error.value.hint
        assert files(out) == before
    assert list(resume(out, threads=1))[-1].finished


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_windows_continue_after_another_batch_size(kind, text_run, chat_run, monkeypatch):
    out, seen = {"text": text_run, "chat": chat_run}[kind], []
    for owner, name in ((TokenDataset, "_train_window"), (PackedRows, "_window")):
        method = getattr(owner, name)

        def record(self, i, method=method):
            seen.append(i)
            return method(self, i)

        monkeypatch.setattr(owner, name, record)
    options = {"override": True, "threads": 1, "overrides": {"batch_size": "6"}}
    stopped = list(resume(out, stopped=stop_after(3), **options))[-1]
    done = list(resume(out, threads=1))[-1]
    n_windows = 5 * 4 + (14 - 5) * 6
    assert seen == list(range(20, n_windows))
    assert stopped.tokens == (20 + 18) * done.tokens / n_windows


def test_end_of_fine_tuning_can_be_set_in_steps(chat_run):
    settings = {"steps": 16}
    assert list(resume(chat_run, override=True, settings=settings, threads=1))[-1].step == 16


@pytest.mark.parametrize(
    "values",
    [
        {"eval_every": 2**63},
        {"minutes": 1e300},
        {"lora_alpha": 1e300},
        {"bigram_start": "yes"},
        {"minutes": True},
        {"activation_checkpointing": 1},
    ],
)
def test_values_of_wrong_types_and_sizes_are_refused(values):
    with pytest.raises(UsageError, match=f"{min(values)}: invalid value") as error:
        TrainConfig(**values)
    assert error.value.hint


def test_whole_numbers_become_floats():
    for config in (TrainConfig, ResolvedTrainConfig):
        assert type(config(weight_decay=2**70).weight_decay) is float


def test_a_tokenizer_that_changes_the_text_is_noted(text_run, tmp_path):
    tokenizer = json.loads((text_run / "tokenizer.json").read_text())
    for kind, is_noted in (("NFC", False), ("Lowercase", True)):
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(tokenizer | {"normalizer": {"type": kind}}))
        options = {"tokenizer": str(path), "train": TrainConfig(steps=1), "overwrite": True}
        notes = start_run(request(tmp_path, "other", **options)).notes
        assert any(f"is learned ({kind})" in note for note in notes) == is_noted


def test_tokenizer_of_a_directory_has_its_end_of_text(text_run, tmp_path):
    """As named by tokenizer_config.json, else by generation_config.json or config.json."""
    tokenizer = json.loads((text_run / "tokenizer.json").read_text())
    old = json.dumps("<|endoftext|>")
    content = json.dumps(tokenizer).replace(old, json.dumps("</s>"))
    end = tokenizer["model"]["vocab"]["<|endoftext|>"]
    named = {
        "tokenizer_config.json": {"eos_token": {"content": "</s>"}},
        "generation_config.json": {"eos_token_id": [end]},
        "config.json": {"eos_token_id": end},
    }
    for name in ["", *named]:
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(content)
        if name:
            (folder / name).write_text(json.dumps(named[name]))
        for path in (folder, folder / "tokenizer.json"):
            options = {"tokenizer": str(path), "train": TrainConfig(steps=1), "overwrite": True}
            plan = start_run(request(tmp_path, "other", **options))
            record, _ = load_run(tmp_path / "other")
            assert record["end_of_text"] == (end if name else None)
            assert any("no end-of-text token" in note for note in plan.notes) == (not name)
    with pytest.raises(UsageError, match="vocab_size=500 has no effect with the tokenizer"):
        start_run(request(tmp_path, "none", tokenizer=str(folder), vocab_size=500))


def test_lora_settings_beside_an_adapter_are_refused(text_run, tmp_path):
    shape = dict.fromkeys(("d_model", "n_layers", "n_heads", "context_length", "dropout"))
    given = {"overrides": shape, "train": TrainConfig(steps=1, lora=2), "start_from": text_run}
    list(runs.start(request(tmp_path, "adapter", **given)))
    for name, value in (("lora_alpha", "99"), ("lora_targets", "attention")):
        options = {"adapter": tmp_path / "adapter", "train": TrainConfig(steps=1)}
        with pytest.raises(UsageError, match=f"{name} cannot be combined with --adapter"):
            start_run(request(tmp_path, "more", overrides=shape | {name: value}, **options))


@pytest.mark.usefixtures("chat_run")  # for its rows
@pytest.mark.parametrize("length", ["0", "-1"])
def test_context_of_no_tokens_is_refused_in_fine_tuning(text_run, tmp_path, length):
    shape = dict.fromkeys(("d_model", "n_layers", "n_heads", "dropout"))
    for corpus, more in (("corpus.txt", {}), ("rows.jsonl", {"chat": True, "template": "plain"})):
        more |= {"corpus": [str(tmp_path / corpus)], "start_from": text_run}
        given = request(tmp_path, "new", overrides=shape | {"context_length": length}, **more)
        with pytest.raises(UsageError, match=f"context_length: invalid value {length}"):
            start_run(given)
