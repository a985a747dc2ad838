"""Models described by their files alone, as loading them would describe them."""

import json
import os

import pytest

from support.models import make_model
from tgen.checkpoint import model_dir, model_lookup
from tgen.checkpoint.export import export_gguf, export_transformers
from tgen.cli.models import describe_model, describe_models


def describe(path):
    return describe_model(path, name="name", found_by="a path", is_default=False)


def test_description_equals_the_loaded_model(family, model_directory):
    report = describe(model_directory)
    bundle = model_dir.load(model_directory)
    assert report.problem == ""
    assert report.family == family
    assert report.context_length == bundle.config.context_length
    assert report.n_parameters == sum(array.size for array in bundle.arrays.values())
    assert report.dtype == "float32"
    assert report.n_bytes == sum(file.stat().st_size for file in model_directory.iterdir())
    os.utime(model_directory / "model.safetensors", (0, 1_000_000_000))
    assert describe(model_directory).modified == 1_000_000_000


def test_training_states_do_not_change_the_time_of_the_weights(tokenizer, tmp_path):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path, model.config, tokenizer, model.to_arrays())
    state = tmp_path / "training" / "state-00000100" / "state.safetensors"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"")
    os.utime(tmp_path / "model.safetensors", (0, 1_000_000_000))
    os.utime(state, (0, 1_100_000_000))
    assert describe(tmp_path).modified == 1_000_000_000


def test_the_shipped_model_is_the_default_of_a_checkout(tokenizer, tmp_path, monkeypatch):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    shipped = tmp_path / "models" / "shakespeare"
    model_dir.save(shipped, model.config, tokenizer, model.to_arrays())
    monkeypatch.setattr(model_lookup, "shipped_model", shipped.resolve)
    monkeypatch.chdir(tmp_path)
    (local,) = [report for report in describe_models() if report.found_by == "./models"]
    assert local.is_default


@pytest.mark.parametrize("stored", ["f16", "q8_0"])
def test_gguf_files_are_described(stored, tokenizer, tmp_path):
    pytest.importorskip("gguf")
    model = make_model("llama", vocab_size=tokenizer.vocab_size, tied_embeddings=True)
    model_dir.save(tmp_path / "model", model.config, tokenizer, model.to_arrays())
    bundle = model_dir.load(tmp_path / "model")
    out = tmp_path / "model.gguf"
    export_gguf(bundle, out, name="model", stored=stored, progress=lambda _: None)
    report = describe(out)
    assert report.family == "llama"
    assert report.dtype == {"f16": "float16", "q8_0": "q8_0"}[stored]
    assert report.n_parameters == sum(array.size for array in bundle.arrays.values())
    assert report.n_bytes == out.stat().st_size
    loaded = model_dir.load_tokenizer(out)
    assert loaded.encode(b"The king") == tokenizer.encode(b"The king")


def test_shards_in_another_dtype_are_described(tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "model", model.config, tokenizer, model.to_arrays())
    bundle = model_dir.load(tmp_path / "model")
    export_transformers(
        bundle, tmp_path / "out", stored="bf16", max_shard_bytes=20_000, progress=lambda _: None
    )
    report = describe(tmp_path / "out")
    assert report.dtype == "bfloat16"
    assert report.n_parameters == sum(array.size for array in bundle.arrays.values())


def test_model_that_cannot_be_loaded_is_described_with_the_reason(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    report = describe(path)
    assert "unknown model type 'bert'" in report.problem
    assert report.family is report.n_parameters is report.dtype is None
    assert report.n_bytes > 0
    (path / "config.json").write_text("{")
    assert "not valid JSON" in describe(path).problem
    assert describe(tmp_path / "missing").problem
