"""Fine-tuning: tokenizer, shape and weights of the source model; and the reports at the end."""

import dataclasses
import json

import numpy as np
import pytest

from support.command import tgen
from support.models import TEXT, make_model
from support.runs import dry_run, load_run, progress, request, resume, start_run
from support.vocabularies import smollm2_like
from tgen import runs
from tgen.checkpoint import model_dir
from tgen.config.training import TrainConfig
from tgen.errors import UsageError
from tgen.reports.training import DoneReport, EvalReport, MemorizationReport, PlanReport

SLOW = {"learning_rate": "1e-9", "matrix_learning_rate": "1e-9"}


@pytest.fixture
def source(tmp_path):
    list(runs.start(request(tmp_path, "source", family="llama")))
    return tmp_path / "source"


def fine_tune(folder, source, **values):
    """Request a run from `source` without model settings."""
    overrides = {"eval_every": "3", "dropout": "0"} | values.pop("overrides", {})
    plain = request(folder, "tuned", train=TrainConfig(steps=6), **values)
    return dataclasses.replace(plain, start_from=source, overrides=overrides)


def test_run_starts_with_weights_tokenizer_and_shape_of_its_source(tmp_path, source):
    old = model_dir.load(source)
    evaluations = [
        r
        for r in runs.start(fine_tune(tmp_path, source, overrides=SLOW))
        if isinstance(r, EvalReport)
    ]
    new = model_dir.load(tmp_path / "tuned")
    assert new.config == old.config
    assert new.tokenizer.json == old.tokenizer.json
    for name, array in old.arrays.items():
        assert np.allclose(array, new.arrays[name], atol=1e-6), name
    expected = progress(source)["best_bits_per_byte"]
    assert evaluations[0].bits_per_byte == pytest.approx(expected, abs=1e-4)


def test_characters_that_the_tokenizer_lacks_are_replaced_and_counted(tmp_path, source):
    bundle = model_dir.load(source)
    tokenizer = smollm2_like(bundle.tokenizer)
    model = make_model("llama", vocab_size=tokenizer.vocab_size + 7)
    model_dir.save(tmp_path / "holes", model.config, tokenizer, model.to_arrays())
    corpus = tmp_path / "controls.txt"
    corpus.write_bytes(b"\x04" + TEXT + "\x13\U00040000\n".encode() + b"\xff" + TEXT)
    values = {"corpus": [str(corpus)], "start_from": tmp_path / "holes"}
    steps = list(runs.start(dataclasses.replace(fine_tune(tmp_path, source), **values)))
    plan = next(step for step in steps if isinstance(step, PlanReport))
    (note,) = (note for note in plan.notes if "replaced" in note)
    assert note == "replaced 4 characters that the tokenizer cannot express by U+FFFD"
    assert model_dir.load(tmp_path / "tuned").tokenizer.json == tokenizer.json


def test_run_resumes_exactly_without_its_source(tmp_path, source):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}:", "completion": " yes"}) + "\n" for i in range(60))
    )
    rows = {"corpus": [str(tmp_path / "rows.jsonl")]}
    whole = list(runs.start(fine_tune(tmp_path, source, **rows)))
    assert isinstance(whole[-1], DoneReport)
    stop = iter([False] * 4 + [True])
    again = dataclasses.replace(fine_tune(tmp_path, source, **rows), out=tmp_path / "parts")
    list(runs.start(again, stopped=lambda: next(stop)))
    source.rename(tmp_path / "moved")
    list(resume(tmp_path / "parts", threads=1))
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("tuned", "parts")]
    assert weights[0] == weights[1]
    assert weights[0] != (tmp_path / "moved" / "model.safetensors").read_bytes()


def test_end_of_text_keeps_its_name_from_the_source(tmp_path, source):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (source / name).read_text().replace("<|endoftext|>", "<eos>")
        (source / name).write_text(text)
    (end,) = model_dir.load(source).end_ids
    (tmp_path / "rows.jsonl").write_text('{"text": "to be"}\n{"text": "or not"}\n' * 9)
    stop = iter([False] * 4 + [True])
    tuned = fine_tune(tmp_path, source, corpus=[str(tmp_path / "rows.jsonl")])
    list(runs.start(tuned, stopped=lambda: next(stop)))
    list(resume(tmp_path / "tuned", threads=1))
    tokens = load_run(tmp_path / "tuned")[1]["train"]
    assert (tokens == end).any()
    new = model_dir.load(tmp_path / "tuned")
    assert new.tokenizer.end_of_text == end
    assert new.end_ids == {end}
    described = json.loads((tmp_path / "tuned" / "tokenizer_config.json").read_text())
    assert described["eos_token"] == "<eos>"


def make_chat_model(source):
    """Give a model a chat template, three end-of-text tokens and sampling defaults."""
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}é")
    path = source / "generation_config.json"
    values = {"eos_token_id": [0, 5, 7], "temperature": 0.3, "top_p": 0.5, "unknown": [[1]]}
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    path = source / "tokenizer_config.json"
    special = {"bos_token": "k", "unk_token": "of no vocabulary"}
    path.write_text(json.dumps(json.loads(path.read_text()) | special))


def test_chat_settings_are_those_of_the_source_after_resuming_too(tmp_path, source):
    make_chat_model(source)
    stop = iter([False] * 4 + [True])
    list(runs.start(fine_tune(tmp_path, source), stopped=lambda: next(stop)))
    out, files = tmp_path / "tuned", ["chat_template.jinja", "generation_config.json"]
    files += ["config.json", "tokenizer_config.json", "tokenizer.json"]
    source.rename(tmp_path / "moved")
    for name in files[:2]:
        (out / name).unlink()  # the next save writes them again
    list(resume(out, threads=1))
    for name in files:
        assert (out / name).read_bytes() == (tmp_path / "moved" / name).read_bytes(), name
    assert model_dir.load(out).end_ids == {0, 5, 7}


def test_run_from_a_model_with_layer_types_resumes_exactly(tmp_path, source):
    tokenizer = model_dir.load(source).tokenizer
    model = make_model("gemma3", vocab_size=tokenizer.vocab_size, context_length=128)
    model_dir.save(tmp_path / "gemma", model.config, tokenizer, model.to_arrays())
    run_request = fine_tune(tmp_path, tmp_path / "gemma")
    list(runs.start(dataclasses.replace(run_request, out=tmp_path / "whole")))
    last = [0]
    for report in runs.start(
        dataclasses.replace(run_request, out=tmp_path / "parts"), stopped=lambda: last[0] >= 4
    ):
        last[0] = getattr(report, "step", last[0])
    list(resume(tmp_path / "parts", threads=1))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_run_of_an_older_version_without_these_settings_resumes(tmp_path, source):
    stop = iter([False] * 4 + [True])
    list(runs.start(fine_tune(tmp_path, source), stopped=lambda: next(stop)))
    path = tmp_path / "tuned" / "training" / "run.json"
    record = json.loads(path.read_text())
    assert record.pop("inherited")["end_ids"] == [0]
    path.write_text(json.dumps(record))
    assert isinstance(list(resume(tmp_path / "tuned", threads=1))[-1], DoneReport)


@pytest.mark.parametrize("named", [9999, ord("e"), [True, -1], "<eos>"])
def test_invalid_end_of_text_is_ignored(source, named):
    described = json.loads((source / "config.json").read_text())
    (source / "generation_config.json").unlink()
    (source / "config.json").write_text(json.dumps(described | {"eos_token_id": named}))
    loaded = model_dir.load(source)
    assert loaded.tokenizer.end_of_text == described["eos_token_id"]


def test_end_of_text_is_one_of_the_models_end_ids(source):
    described = json.loads((source / "config.json").read_text())
    (source / "generation_config.json").unlink()
    ours, pad = described["eos_token_id"], described["pad_token_id"]
    for ends, expected in [([pad, ours], ours), ([pad], pad), (pad, pad)]:
        (source / "config.json").write_text(json.dumps(described | {"eos_token_id": ends}))
        assert model_dir.load(source).tokenizer.end_of_text == expected


def test_short_corpus_gets_windows_shorter_than_the_models_context(tmp_path, source):
    (tmp_path / "short.txt").write_bytes(b"to be or not to be. " * 4)
    run_request = fine_tune(tmp_path, source, overrides={"context_length": "5"})
    assert dry_run(run_request).context_length == 5
    long_context = request(tmp_path, "long", family="llama", overrides={"context_length": "99"})
    list(runs.start(long_context))
    short = fine_tune(tmp_path, tmp_path / "long", corpus=[str(tmp_path / "short.txt")])
    plan = start_run(short)
    assert plan.context_length == 71  # of 72 bytes to train on
    with pytest.raises(UsageError, match="n_layers=3 cannot be combined with --from"):
        list(
            runs.start(dataclasses.replace(short, out=tmp_path / "b", overrides={"n_layers": "3"}))
        )


def test_row_longer_than_the_models_context_is_named_in_the_plan(tmp_path, source):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "to be " * 10, "completion": "or not to be"}))
    plan = dry_run(fine_tune(tmp_path, source, corpus=[str(rows)]))
    assert plan.context_length == 16
    assert any("base model's; the longest row has 73 tokens" in one.why for one in plan.choices)


def test_options_that_the_source_determines_are_refused(run_here, tmp_path, source):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    for option in (["--family", "gpt2"], ["--size", "tiny"], ["--tokenizer", "char"]):
        refused = run_here("train", "corpus.txt", "--from", source, *option, cwd=tmp_path)
        assert refused.returncode == 2
        assert f"--from cannot be combined with {option[0]}".encode() in refused.stderr
    shown = tgen("train", "corpus.txt", "--from", source, "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0
    assert b"from the model to fine-tune" in shown.stdout
    both = run_here("train", "corpus.txt", "--minutes", 1, "--steps", 1, cwd=tmp_path)
    assert both.returncode == 2
    assert not (tmp_path / "models").exists()


def test_final_reports_contain_memorization_and_baselines(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    reports = list(runs.start(request(tmp_path, train=TrainConfig(steps=5, minutes=60))))
    assert not reports[-1].baselines  # less than 1 KB is held out
    (tmp_path / "corpus.txt").write_bytes(TEXT * 4)
    reports = list(runs.start(request(tmp_path, "b", train=TrainConfig(steps=5, minutes=60))))
    (memory,) = [r for r in reports if isinstance(r, MemorizationReport)]
    assert memory.held_out_bits_per_byte == reports[-1].best_bits_per_byte
    assert "memorize" in memory.verdict
    assert set(reports[-1].baselines) == {"xz -9", "order-5 n-grams"}


@pytest.mark.parametrize(("scaling", "rounding"), [("false", 0), ("true", 1e-7)])
def test_final_figure_counts_every_held_out_byte(tmp_path, scaling, rounding):
    """Whatever part of the held-out text the evaluations before used. The factor of the logits is
    multiplied into the weights, which rounds them."""
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    figures, evaluated = [], set()
    for eval_tokens in ("64", "100000"):
        overrides = {"eval_tokens": eval_tokens, "temperature_scaling": scaling}
        run = request(tmp_path, eval_tokens, train=TrainConfig(steps=5), overrides=overrides)
        reports = list(runs.start(run))
        evaluated |= {r.bits_per_byte for r in reports if isinstance(r, EvalReport)}
        figures.append(reports[-1].best_bits_per_byte)
    assert figures[0] == pytest.approx(figures[1], rel=rounding, abs=0)
    assert len(evaluated) == 2
