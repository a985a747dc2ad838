"""Every setting of a run changes the result, or a note or an error says that it does not."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from support.models import TEXT
from support.runs import contents, request
from tgen import runs
from tgen.config.training import TrainConfig
from tgen.errors import UsageError
from tgen.reports.training import PlanReport
from tgen.runs import trainer
from tgen.runs.overrides import parse_overrides

VALUES = {"grad_clip": "1e-3", "lora_alpha": "5", "lora": "1", "weight_decay": "0.3"}
# These change how a step is computed or evaluated, when a run ends, or which states are on disk.
SAME_RESULT = {"activation_checkpointing", "accumulation", "patience", "keep_checkpoints"}
SAME_RESULT |= {"eval_tokens", "precision"}


def settable() -> dict[str, list[str]]:
    """Return values for each field of TrainConfig that --set takes."""
    values: dict[str, list[str]] = {}
    for one in fields(TrainConfig):
        words = [a for k in (one.type, *get_args(one.type)) for a in get_args(k) if type(a) is str]
        numbers = ["2" if "int" in str(one.type) else "0.01"]
        if "bool" in str(one.type):
            numbers = ["true", "false"]
        try:
            parse_overrides({one.name: words[0] if words else numbers[0]})
        except UsageError:
            continue  # it has an option of its own
        values[one.name] = [VALUES[one.name]] if one.name in VALUES else words or numbers
    return values


@pytest.fixture(autouse=True)
def _weights_alone(monkeypatch):
    """Train without samples and the last reports, which change nothing and take longer."""
    monkeypatch.setattr(trainer, "sample", lambda *_: iter(()))
    monkeypatch.setattr(trainer.Trainer, "_final_reports", lambda *_: iter(()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("effects")
    (path / "corpus.txt").write_bytes(TEXT)
    list(runs.start(start(path, "base", overrides={"context_length": "64"})))
    return path


def start(path: Path, name: str, *, overrides: dict[str, str], **values):
    train = TrainConfig(steps=4, lora=values.pop("lora", None))
    defaults: dict[str, Any] = {"tokenizer": str(path / "base" / "tokenizer.json")}
    if name == "base":
        defaults = {"tokenizer": "bpe", "vocab_size": 300}
    if "start_from" in values:
        shape: dict[str, Any] = dict.fromkeys(("d_model", "n_layers", "n_heads", "context_length"))
        overrides, defaults = shape | overrides, {}
    return request(path, name, train=train, overrides=overrides, **defaults | values)


KINDS: dict[str, dict[str, Any]] = {
    "muon": {},
    "adamw": {"overrides": {"optimizer": "adamw", "tied_embeddings": "true"}},
    "lora": {"start_from": "base", "lora": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_setting_is_ignored_silently(folder, kind):
    values: dict[str, Any] = {**KINDS[kind]}
    others: dict[str, str] = values.pop("overrides", {})
    values |= {k: folder / "base" for k in values if k == "start_from"}

    def result(name, **overrides):
        run = start(folder, name, overrides=others | overrides, **values)
        notes = [r.notes for r in runs.start(run) if isinstance(r, PlanReport)][-1]
        return contents(folder / name), " ".join(notes)

    (plain, _), ignored = result(f"{kind} plain"), []
    for name, texts in settable().items():
        results, refused = [], False
        for i, text in enumerate(texts):
            try:
                files, notes = result(f"{kind} {name} {i}", **{name: text})
                results.append(files)
                refused |= f"{name} has no effect" in notes
            except UsageError as error:
                refused |= name in f"{error.message} {error.field}"
        if not refused and results.count(plain) == len(results):
            ignored.append(name)
    assert SAME_RESULT.issuperset(ignored), ignored
