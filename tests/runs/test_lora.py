"""LoRA runs: what they write, resume and refuse."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.models import TEXT, make_model
from support.runs import contents, dry_run, request, resume
from tgen import runs
from tgen.checkpoint import model_dir
from tgen.checkpoint.dtypes import to_bfloat16
from tgen.checkpoint.safetensors_file import read_arrays, read_header
from tgen.cli import app
from tgen.config.training import TrainConfig
from tgen.errors import ModelError, TrainingError, UsageError
from tgen.lora import adapter, adapter_base, model_with_adapter
from tgen.model.transformer import Transformer
from tgen.planning import side_work
from tgen.planning.costs import n_parameters
from tgen.reports.training import DoneReport, EvalReport, PlanReport
from tgen.runs import base_model, forgetting, prepare


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.setattr(forgetting, "TEXT_TOKENS", 4)
    monkeypatch.setattr(side_work, "SAMPLE_TOKENS", 4)
    monkeypatch.setattr(side_work, "MEMORIZATION_TOKENS", 4)
    monkeypatch.setattr(prepare, "measure_speed", lambda *_, **__: 1e9)


@pytest.fixture
def base(tmp_path, tokenizer) -> Path:
    """Save a random model in bfloat16."""
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size, context_length=32)
    arrays = {n: to_bfloat16(a) if a.ndim == 2 else a for n, a in model.to_arrays().items()}
    from tgen.checkpoint.export import export_transformers

    model_dir.save(tmp_path / "float32", model.config, tokenizer, model.to_arrays())
    bundle = dataclasses.replace(model_with_adapter.load(tmp_path / "float32"), arrays=arrays)
    export_transformers(
        bundle, tmp_path / "base", stored="bf16", max_shard_bytes=1 << 30, progress=lambda _: None
    )
    return tmp_path / "base"


def lora_request(folder, base, name="tuned", *, lora=2, overrides=(), **values):
    settings = {"eval_every": "3", "batch_size": "2"} | dict(overrides)
    train = TrainConfig(steps=values.pop("steps", 6), lora=lora)
    plain = request(folder, name, train=train, **values)
    return dataclasses.replace(plain, start_from=base, overrides=settings)


def stop_after(n):
    calls = iter([False] * n)
    return lambda: next(calls, True)


def state_names(out):
    (path,) = sorted(out.glob("training/state-*"))[-1:]
    header = read_header(path / "state.safetensors")
    return read_arrays(path / "state.safetensors", header)


def test_run_trains_and_writes_the_adapter_alone(tmp_path, base):
    before = (base / "model.safetensors").read_bytes()
    reports = list(runs.start(lora_request(tmp_path, base)))
    out = tmp_path / "tuned"
    assert (base / "model.safetensors").read_bytes() == before
    assert not (out / "config.json").exists()
    assert not (out / "model.safetensors").exists()
    assert (out / "tokenizer.json").exists()
    values = json.loads((out / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"]) == (2, 32)
    assert values["base_model_name_or_path"] == str(base.resolve())
    arrays = state_names(out)
    n_adapter = sum(a.size for name, a in arrays.items() if name.startswith("model/"))
    assert n_adapter == sum(pair.a.size + pair.b.size for pair in adapter.read(
        out, model_with_adapter.load(base).config).pairs.values())  # fmt: skip
    assert all(".a" in name or ".b." in name for name in arrays)
    (plan,) = [r for r in reports if isinstance(r, PlanReport)]
    choices = {choice.name: choice for choice in plan.choices}
    assert choices["LoRA"].value.startswith("rank 2, ")
    assert choices["dropout"].value == "0"
    assert choices["learning rate"].value == "AdamW 0.002"
    done = reports[-1]
    assert isinstance(done, DoneReport)
    assert done.general_before is not None
    assert done.general_after is not None
    evaluations = [r for r in reports if isinstance(r, EvalReport)]
    assert done.best_bits_per_byte == pytest.approx(min(r.bits_per_byte for r in evaluations))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_is_the_uninterrupted_one(tmp_path, base, optimizer):
    overrides = {"optimizer": optimizer, "activation_checkpointing": "true", "dropout": "0.1"}
    list(runs.start(lora_request(tmp_path, base, "whole", overrides=overrides)))
    stopped = stop_after(3)
    list(runs.start(lora_request(tmp_path, base, "parts", overrides=overrides), stopped=stopped))
    list(resume(tmp_path / "parts", threads=1))
    whole, parts = (contents(tmp_path / name) for name in ("whole", "parts"))
    assert "training/state-00000006/state.safetensors" in whole.keys() & parts.keys()
    assert {n: whole[n] for n in whole.keys() & parts.keys()} == {
        n: parts[n] for n in whole.keys() & parts.keys()
    }


def test_resuming_finds_the_base_by_name_or_refuses(tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    base.rename(tmp_path / "models" / "named")
    started = lora_request(tmp_path, Path("named"))
    list(runs.start(started, stopped=stop_after(3)))
    values = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == "named"
    other = tmp_path / "elsewhere" / "models"
    other.mkdir(parents=True)
    (tmp_path / "models" / "named").rename(other / "named")
    with pytest.raises(TrainingError, match=r"models/named \(--from named\) .* is missing"):
        list(resume(tmp_path / "tuned", threads=1))
    monkeypatch.chdir(other.parent)
    reports = list(
        resume(
            tmp_path / "tuned",
            threads=1,
        )
    )
    assert isinstance(reports[-1], DoneReport)


def test_resuming_refuses_a_changed_base(tmp_path, base):
    list(runs.start(lora_request(tmp_path, base), stopped=stop_after(3)))
    bundle = model_with_adapter.load(base)
    arrays = {name: np.array(array) for name, array in bundle.arrays.items()}
    arrays["token_embedding.weight"][0, 0] ^= 1
    from tgen.checkpoint.hf import tensor_names
    from tgen.checkpoint.safetensors_file import serialize_in_parts

    parts = serialize_in_parts(tensor_names.to_hf_arrays(bundle.config, arrays), uint16="BF16")
    (base / "model.safetensors").write_bytes(b"".join(parts))
    with pytest.raises(TrainingError, match="of this run has changed"):
        list(resume(tmp_path / "tuned", threads=1))


def test_all_weights_of_an_adapter_with_its_base_are_fine_tuned(tmp_path, base):
    list(runs.start(lora_request(tmp_path, base)))
    config = TrainConfig(steps=1)
    run_request = lora_request(tmp_path, tmp_path / "tuned", "again", lora=None, steps=1)
    opened, _ = base_model.open_base(run_request, config)
    assert opened.bundle
    merged, plain = (
        model_with_adapter.load(tmp_path / "tuned").arrays,
        model_with_adapter.load(base).arrays,
    )
    for name, array in opened.bundle.arrays.items():
        assert np.array_equal(array, merged[name])
    assert any(not np.array_equal(merged[name], plain[name]) for name in plain)
    list(runs.start(run_request))
    assert (tmp_path / "again" / "model.safetensors").exists()


def test_adapter_continues_in_a_new_run(tmp_path, base):
    list(runs.start(lora_request(tmp_path, base, "first")))
    again = lora_request(tmp_path, None, "second", lora=None, overrides={"learning_rate": "1e-9"})
    list(runs.start(dataclasses.replace(again, adapter=tmp_path / "first")))
    config = model_with_adapter.load(base).config
    first, second = (adapter.read(tmp_path / n, config).pairs for n in ("first", "second"))
    for name, pair in first.items():
        assert np.allclose(pair.a, second[name].a, atol=1e-6)
        assert np.allclose(pair.b, second[name].b, atol=1e-6)
        assert pair.b.any()


def test_adapter_with_other_ranks_and_scales_continues(tmp_path, base):
    list(runs.start(lora_request(tmp_path, base, "first")))
    bundle = model_with_adapter.load(base)
    pairs = adapter.read(tmp_path / "first", bundle.config).pairs
    name = next(iter(pairs))
    pairs[name] = pairs[name]._replace(a=pairs[name].a[:1], b=pairs[name].b[:, :1], scale=5.0)
    digest = adapter_base.base_digest(bundle.arrays)
    files = adapter.build_files(bundle.config, pairs, base=str(base), digest=digest, alpha=32.0)
    for file, content in files.items():
        whole = content if isinstance(content, bytes) else b"".join(content)
        (tmp_path / "first" / file).write_bytes(whole)
    again = lora_request(tmp_path, None, "second", lora=None, overrides={"learning_rate": "1e-9"})
    again = dataclasses.replace(again, adapter=tmp_path / "first")
    list(runs.start(again, stopped=stop_after(3)))
    list(resume(tmp_path / "second", threads=1))
    for key, (a, b, scale) in adapter.read(tmp_path / "second", bundle.config).pairs.items():
        assert a.shape == pairs[key].a.shape
        old = (pairs[key].b @ pairs[key].a) * pairs[key].scale
        assert np.allclose((b @ a) * scale, old, atol=1e-5)


def test_contradictions_are_refused(tmp_path, base):
    for name, values, message in [
        ("a", {"start_from": None}, "--lora needs --from"),
        ("b", {"adapter": tmp_path / "x"}, "--adapter cannot be combined with --lora"),
        ("c", {"ngrams": True}, "--ngrams cannot be combined with LoRA"),
    ]:
        refused = dataclasses.replace(lora_request(tmp_path, base, name), **values)
        with pytest.raises(UsageError, match=message):
            list(runs.start(refused))
    list(runs.start(lora_request(tmp_path, base)))
    onto = dataclasses.replace(lora_request(tmp_path, tmp_path / "tuned", "d"))
    with pytest.raises(UsageError, match="which is an adapter"):
        list(runs.start(onto))
    with pytest.raises(UsageError, match="lora: cannot be changed"):
        list(resume(tmp_path / "tuned", settings={"lora": 4}, override=True, threads=1))


def test_errors_of_adapters_name_the_options_of_training(tmp_path, base):
    list(runs.start(lora_request(tmp_path, base, "my tuned")))
    again = lora_request(tmp_path, None, "again", lora=None)
    with pytest.raises(ModelError, match="is not an adapter") as error:
        list(runs.start(dataclasses.replace(again, adapter=base)))
    assert error.value.hint == "it is a model: name it with --model or --from"
    base.rename(tmp_path / "moved")
    tuned = tmp_path / "my tuned"
    with pytest.raises(ModelError, match="does not exist") as error:
        list(runs.start(dataclasses.replace(again, adapter=tuned)))
    assert error.value.hint == f"name both: --from BASE --adapter '{tuned}'"
    with pytest.raises(ModelError, match="does not exist") as error:
        list(runs.start(dataclasses.replace(again, start_from=tuned)))
    assert error.value.hint == f"name both: --from BASE --adapter '{tuned}'"


def test_run_never_replaces_what_it_starts_from(tmp_path, base):
    list(runs.start(lora_request(tmp_path, base)))
    tuned, link = tmp_path / "tuned", tmp_path / "link"
    link.symlink_to(base)
    before = contents(tmp_path)
    for values in (
        {"out": base},
        {"out": link},
        {"out": base, "start_from": link},
        {"out": base, "train": TrainConfig(steps=6)},
        {"out": base, "start_from": tuned, "train": TrainConfig(steps=6)},
        {"out": base, "start_from": None, "adapter": tuned, "train": TrainConfig(steps=6)},
        {"out": tuned, "start_from": None, "adapter": tuned, "train": TrainConfig(steps=6)},
        {"out": tuned, "start_from": tuned, "train": TrainConfig(steps=6)},
    ):
        for overwrite in (True, False):
            refused = lora_request(tmp_path, base, overwrite=overwrite)
            refused = dataclasses.replace(refused, **values)
            for start in (lambda one: list(runs.start(one)), dry_run):
                with pytest.raises(UsageError, match="this run starts from it") as error:
                    start(refused)
                assert str(values["out"]) in error.value.message
    assert contents(tmp_path) == before
    assert not (base / "training").exists()


@pytest.fixture
def tgen(capsysbinary):
    """Run a command in this process."""

    def run(*words: object) -> SimpleNamespace:
        status = app.run([str(word) for word in words])
        out, err = capsysbinary.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return run


def test_commands_take_an_adapter(tmp_path, base, tgen):
    tuned, merged = tmp_path / "tuned", tmp_path / "merged"
    settings = ["--set=batch_size=2", "--set=eval_every=3", "--set=learning_rate=0.1"]
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    trained = tgen("train", tmp_path / "corpus.txt", "--from", base, "--lora", 2, "--steps", 4,
                   "--out", tuned, *settings)  # fmt: skip
    assert trained.status == 0, trained.err.decode()
    assert b"general text: " in trained.err
    options = ["--prompt", "What", "-n", 20, "--temperature", 0, "-q", "--dtype", "float32"]
    alone = tgen("generate", "--adapter", tuned, *options)
    assert alone.status == 0, alone.err.decode()
    assert alone.out == tgen("generate", "--model", base, "--adapter", tuned, *options).out
    assert alone.out == tgen("generate", "--model", tuned, *options).out
    assert alone.out != tgen("generate", "--model", base, *options).out
    to = ["--merge", "--to", "transformers", "--out"]
    assert tgen("export", tuned, *to, merged).status == 0
    assert alone.out == tgen("generate", "--model", merged, *options).out
    rounded = tgen("export", tuned, *to, tmp_path / "rounded", "--type", "bf16")
    assert b"rounding to bf16 changes what the adapter learned by " in rounded.err
    refused = tgen("export", tuned, "--to", "gguf")
    assert refused.status == 2
    assert b"add --merge" in refused.err
    shown = tgen("inspect", "--adapter", tuned, "--view", "tokens", "--prompt", "What")
    assert shown.status == 0, shown.err.decode()


def test_only_adapters_are_offered_as_adapters(tmp_path, base, tgen, monkeypatch):
    list(runs.start(lora_request(tmp_path, base, "models/known")))
    base.rename(tmp_path / "models" / "base")
    monkeypatch.chdir(tmp_path)
    for command in (
        ["generate", "--prompt", "a"],
        ["inspect", "--view", "tokens", "--prompt", "a"],
        ["train", "corpus.txt", "--from", "base", "--out", "other"],
    ):
        unknown = tgen(*command, "--adapter", "nix")
        assert unknown.status == 1
        assert b"adapter 'nix' does not exist: not a path, and not in ./models, " in unknown.err
        assert b"choose one of these adapters: known\n" in unknown.err
        model = tgen(*command, "--adapter", "base")
        assert model.status == 1
        assert b"'models/base' is not an adapter: it has no adapter_config.json" in model.err
        assert b"it is a model: name it with --model or --from" in model.err


def test_merged_export_computes_what_the_adapter_computes(tmp_path, base, tgen):
    list(runs.start(lora_request(tmp_path, base, overrides={"learning_rate": "0.1"})))
    to = ["--merge", "--to", "transformers", "--out", tmp_path / "merged"]
    assert tgen("export", tmp_path / "tuned", *to).status == 0
    ids = torch.arange(20)[None] * 7 % 290
    with torch.no_grad():
        logits = [
            Transformer.from_arrays(bundle.config, bundle.arrays)(ids)
            for bundle in map(
                model_with_adapter.load, (tmp_path / "tuned", tmp_path / "merged", base)
            )
        ]
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert not torch.allclose(logits[0], logits[2], atol=1e-2)


def test_estimate_for_ranks_is_that_of_the_adapter_and_the_plan(tmp_path, base, monkeypatch):
    monkeypatch.setattr(prepare, "measure_speed", lambda *_, **__: 1e12)
    one = lora_request(tmp_path, base, n_ranks=1)
    plan = dry_run(dataclasses.replace(one, train=TrainConfig(minutes=5, lora=2)))
    assert plan.scaling is not None
    frozen = model_with_adapter.load(base).config
    assert plan.scaling.ranks[0].gradients < 4 * n_parameters(frozen) / 10
    steps = next(choice.value for choice in plan.choices if choice.name == "steps")
    assert steps == f"at most {plan.scaling.steps:,}"


def test_speed_of_one_rank_is_that_of_the_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "measure_speed", lambda *_, **__: 1e10)
    plan = dry_run(request(tmp_path, train=TrainConfig(minutes=5), n_ranks=1))
    assert plan.scaling is not None
    steps = next(choice.value for choice in plan.choices if choice.name == "steps")
    rounded = round(plan.scaling.steps, 2 - len(str(plan.scaling.steps)))
    assert steps == f"about {rounded:,}"


def test_moved_base_is_named_when_a_run_resumes(tmp_path, base):
    list(runs.start(lora_request(tmp_path, base, "whole")))
    list(runs.start(lora_request(tmp_path, base), stopped=stop_after(3)))
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(TrainingError, match="is missing") as error:
        list(resume(tmp_path / "tuned", threads=1))
    assert "--from" in error.value.hint
    with pytest.raises(TrainingError, match="of this run has changed"):
        list(resume(tmp_path / "tuned", threads=1, start_from=tmp_path / "float32"))
    list(resume(tmp_path / "tuned", threads=1, start_from=moved))
    list(resume(tmp_path / "tuned", threads=1))  # the run has recorded the path
    weights = "adapter_model.safetensors"
    assert (tmp_path / "tuned" / weights).read_bytes() == (
        tmp_path / "whole" / weights
    ).read_bytes()
    (tmp_path / "tuned" / weights).unlink()
    list(resume(tmp_path / "tuned", threads=1))
    assert (tmp_path / "tuned" / weights).read_bytes() == (
        tmp_path / "whole" / weights
    ).read_bytes()
