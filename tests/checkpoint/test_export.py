"""`tgen export`: the same model in another format, or one clear error and nothing written."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save

from support import tokenizer_files
from support.command import tgen
from support.models import make_model
from tgen.checkpoint import dtypes, export, model_dir
from tgen.checkpoint.dtypes import cast, to_float32
from tgen.checkpoint.gguf import header
from tgen.checkpoint.gguf import reader as gguf_reader
from tgen.checkpoint.gguf.tokenizer import to_fields
from tgen.checkpoint.gguf.writer import DTYPES, write_gguf
from tgen.cli import streams
from tgen.cli.app import run
from tgen.errors import ModelError
from tgen.lora import model_with_adapter
from tgen.model.transformer import Transformer
from tgen.storage import files
from tgen.tokenizer import END_OF_TEXT, PAD, Tokenizer

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def model(tokenizer, tmp_path):
    """A directory with a chat template and an unknown key in config.json."""
    random = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "model", random.config, tokenizer, random.to_arrays())
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    json_config = json.loads((tmp_path / "model" / "config.json").read_bytes())
    json_config |= {"their_own": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(json_config))
    return tmp_path / "model"


def run_export(model, *options):
    out = model.parent / "out"
    assert run(["export", str(model), "--out", str(out), "-q", *map(str, options)]) == 0
    return out


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("size", [None, "20KB"])
def test_transformers_loads_every_dtype_and_shards(kind, size, model, caplog):
    transformers = pytest.importorskip("transformers")
    shards = [] if size is None else ["--max-shard-size", size]
    out = run_export(model, "--to", "transformers", "--type", kind, *shards)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype="auto"
    )
    assert not any(info.values())
    assert not caplog.records
    assert theirs.dtype == TORCH[kind]
    bundle = model_with_adapter.load(out)
    ours = Transformer.from_arrays(bundle.config, bundle.arrays)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        difference = theirs.float().eval()(tokens).logits - ours(tokens)
    assert difference.abs().max() <= 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "What is naïve 🦋?"
    assert tokenizer.encode(text) == bundle.tokenizer.encode(text.encode())
    assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_other_files_are_copied(model):
    out = run_export(model, "--to", "transformers", "--type", "bf16")
    for path in model.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert (out / path.name).read_bytes() == path.read_bytes()
    before, after = (json.loads((p / "config.json").read_bytes()) for p in (model, out))
    assert after == before | {"torch_dtype": "bfloat16"}


def test_shards_have_an_index_and_a_maximum_size(model):
    out = run_export(model, "--to", "transformers", "--max-shard-size", "20KB")
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    shards = sorted(out.glob("*.safetensors"))
    n = len(shards)
    assert [p.name for p in shards] == [
        f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)
    ]
    actual = {name: (p.name, array) for p in shards for name, array in load_file(p).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in actual.items()}
    assert index["metadata"]["total_size"] == sum(a.nbytes for _, a in actual.values())
    whole = load_file(model / "model.safetensors")
    assert actual.keys() == whole.keys()
    assert all(np.array_equal(array, whole[name]) for name, (_, array) in actual.items())
    for path in shards:
        arrays = load_file(path)
        assert len(arrays) == 1 or sum(a.nbytes for a in arrays.values()) <= 20_000


def test_cast_rounds_to_nearest_ties_to_even():
    odd = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -0.0, 1e-40], np.float32)
    random = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for wide in (odd, random):
        for kind in ("f16", "bf16"):
            theirs = torch.from_numpy(wide).to(TORCH[kind]).float().numpy()
            ours = to_float32(cast("x", wide, DTYPES[kind]))
            assert ours.tobytes() == theirs.tobytes()
            assert cast("x", ours, "float32") is ours
    halves = cast("x", random, "float16")
    assert np.array_equal(
        to_float32(cast("x", halves, "bfloat16")),
        torch.from_numpy(halves).bfloat16().float().numpy(),
    )
    with pytest.raises(ModelError, match="x: 7e\\+04 is too large for float16"):
        cast("x", np.array([7e4], np.float32), "float16")
    assert dtypes.dtype_of(halves) == "float16"


def test_dtype_is_kept_by_default(model):
    half = run_export(model, "--to", "transformers", "--type", "f16")
    again = model.parent / "again"
    assert run(["export", str(half), "--to", "transformers", "--out", str(again), "-q"]) == 0
    assert (again / "model.safetensors").read_bytes() == (half / "model.safetensors").read_bytes()


def test_gguf_file_is_exported_to_a_directory(model):
    first = model.parent / "m.gguf"
    assert run(["export", str(model), "--to", "gguf", "--out", str(first), "-q"]) == 0
    out = run_export(first, "--to", "transformers")
    expected, actual = model_with_adapter.load(model), model_with_adapter.load(out)
    assert actual.config == expected.config
    assert all(np.array_equal(actual.arrays[n], a) for n, a in expected.arrays.items())
    text = "What is naïve 🦋? 123".encode()
    assert actual.tokenizer.encode(text) == expected.tokenizer.encode(text)
    assert (out / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_gguf_has_the_metadata_of_the_model(model, monkeypatch):
    gguf = pytest.importorskip("gguf", reason="NO GGUF")
    monkeypatch.chdir(model.parent)
    assert run(["export", "model", "--to", "gguf", "--type", "q8_0", "-q"]) == 0
    reader = gguf.GGUFReader("model-q8_0.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.name"] == "model"
    assert fields["tokenizer.chat_template"] == "{{ messages[0].content }}"
    assert fields["tokenizer.ggml.pre"] == "llama-bpe"
    assert fields["tokenizer.ggml.add_bos_token"] is False
    source, named, _ = gguf_reader.chat_template(model.parent / "model-q8_0.gguf")
    assert source == fields["tokenizer.chat_template"]
    assert named == dict(bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PAD)
    ids = [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")]
    assert ids == [0, 0, 1]
    assert fields["tokenizer.ggml.token_type"][:3] == [3, 3, 1]


@pytest.mark.parametrize("kind", ["q8_0", "q6_k", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_every_quantized_type_is_written_and_read(kind, model, capsys):
    pytest.importorskip("gguf", reason="NO GGUF")
    out = model.parent / "out.gguf"
    options = ["--to", "gguf", "--type", kind, "--out", str(out)]
    assert run(["export", str(model), *options]) == 0
    # the output matrix has rows of 32, too short for q6_k
    others = {"q8_0": "", "q6_k": "15 q8_0"}.get(kind, f"14 {kind}, 1 q8_0")
    message = f"types of the matrices, as llama.cpp chooses: {others}"
    assert (message in capsys.readouterr().err) is (kind != "q8_0")
    expected, actual = model_with_adapter.load(model), model_with_adapter.load(out)
    assert actual.quantized
    name = "blocks.0.feed_forward.up_proj.weight"
    error = np.abs(np.asarray(actual.arrays[name]) - expected.arrays[name]).max()
    assert 0 < error < np.abs(expected.arrays[name]).max() / (4 if kind[1] == "4" else 10)


def test_difference_to_llama_cpp_is_a_warning(tmp_path, capsys):
    pytest.importorskip("gguf", reason="NO GGUF")
    file = tokenizer_files.sentencepiece(splitter=tokenizer_files.metaspace("first"))
    file["model"]["merges"] = [p for p in file["model"]["merges"] if len("".join(p)) == 2]
    short = {p[0] + p[1] for p in file["model"]["merges"]}
    names = [n for n in file["model"]["vocab"] if len(n) == 1 or n[0] == "<" or n in short]
    names = [name for name in names if "\0" not in name]  # llama.cpp cannot read it
    file["model"]["merges"] = [p for p in file["model"]["merges"] if "".join(p) in names]
    file["model"]["vocab"] = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(json.dumps(file), end_ids=[2])
    random = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "model", random.config, tokenizer, random.to_arrays())
    out = str(tmp_path / "out.gguf")
    assert run(["export", str(tmp_path / "model"), "--to", "gguf", "--out", out]) == 0
    assert "warning: llama.cpp puts one more space before a text" in capsys.readouterr().err
    text = "What is naïve?".encode()
    assert model_with_adapter.load(Path(out)).tokenizer.encode(text) == tokenizer.encode(text)


def test_head_and_config_agree_in_an_export(tokenizer, tmp_path):
    own = make_model("qwen3", vocab_size=tokenizer.vocab_size, tied_embeddings=False)
    path = tmp_path / "m"
    model_dir.save(path, own.config, tokenizer, own.to_arrays())
    config = json.loads((path / "config.json").read_bytes()) | {"tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(config))
    out = run_export(path, "--to", "transformers")
    assert json.loads((out / "config.json").read_bytes())["tie_word_embeddings"] is False
    assert not model_with_adapter.load(out).warnings


def test_special_tokens_of_a_gguf_file_are_kept(tokenizer, tmp_path):
    gguf = pytest.importorskip("gguf", reason="NO GGUF")
    llama = make_model("llama", vocab_size=tokenizer.vocab_size)
    fields = to_fields(tokenizer, tokenizer.vocab_size, ends=[0], bos=3, pad=4)
    write_gguf(tmp_path / "m.gguf", llama.config, llama.to_arrays(), tokenizer_fields=fields)
    again = gguf.GGUFReader(run_export(tmp_path / "m.gguf", "--to", "gguf")).fields
    ids = {name: again[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "padding")}
    assert ids == {"bos": 3, "padding": 4}


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--to", "transformers"], 2, "--to transformers needs --out"),
        (
            ["--to", "transformers", "--type", "q8_0", "--out", "x"],
            2,
            "--type q8_0 cannot be combined",
        ),
        (
            ["--to", "transformers", "--type", "q4_0", "--out", "x"],
            2,
            "--type q4_0 cannot be combined",
        ),
        (["--to", "gguf", "--max-shard-size", "1MB"], 2, "--max-shard-size cannot be combined"),
        (
            ["--to", "transformers", "--out", "x", "--max-shard-size", "big"],
            2,
            "not a size (got 'big')",
        ),
        (["--to", "transformers", "--out", "model"], 2, "is the model itself or contains it"),
        (
            ["--to", "transformers", "--out", ".", "--overwrite"],
            2,
            "is the model itself or contains it",
        ),
        (["--to", "transformers", "--out", "other", "--overwrite"], 2, "contains other files: src"),
        (["--to", "gguf", "--out", "text", "--overwrite"], 2, "is not a GGUF file"),
        (["--to", "gguf", "--out", "other", "--overwrite"], 2, "is a directory, not a file"),
        (["--to", "transformers", "--out", "text", "--overwrite"], 2, "is a file, not a directory"),
        (
            ["--to", "transformers", "--out", "run", "--overwrite"],
            2,
            "contains other files: training",
        ),
    ],
)
def test_usage_error_writes_nothing(options, status, message, model, monkeypatch, capsys):
    monkeypatch.chdir(model.parent)
    (model.parent / "other" / "src").mkdir(parents=True)
    (model.parent / "other" / "config.json").write_text("{}")
    (model.parent / "text").write_text("mine")
    (model.parent / "run" / "training").mkdir(parents=True)
    (model.parent / "run" / "config.json").write_text("{}")
    before = sorted(model.parent.rglob("*"))
    assert run(["export", "model", *options]) == status
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[0]
    assert lines[1].startswith("hint: ")
    assert sorted(model.parent.rglob("*")) == before
    assert (model.parent / "text").read_text() == "mine"


def test_existing_model_is_replaced_only_with_overwrite(model, capsys):
    for to in ("gguf", "transformers"):
        out = str(model.parent / f"out.{to}")
        arguments = ["export", str(model), "--to", to, "--out", out]
        assert run(arguments) == 0
        assert run(arguments) == 2
        assert "already contains a model" in capsys.readouterr().err
        assert run([*arguments, "--type", "f16", "--overwrite"]) == 0
        arrays = model_with_adapter.load(model.parent / f"out.{to}").arrays
        assert arrays["token_embedding.weight"].dtype == np.float16
    assert not list(model.parent.glob(files.TEMPORARY + "*"))


@pytest.mark.parametrize("to", ["gguf", "transformers"])
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_failed_export_keeps_the_old_files(to, name, model, monkeypatch):
    out = run_export(model, "--to", to)
    before = {p: p.read_bytes() for p in model.parent.rglob("*") if p.is_file()}

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, fail)
    bundle, fractions = model_with_adapter.load(model), []
    write = {
        "gguf": partial(export.export_gguf, name="m", stored="f16"),
        "transformers": partial(export.export_transformers, stored="f16", max_shard_bytes=20_000),
    }[to]
    with pytest.raises(OSError, match="No space left"):
        write(bundle, out, progress=fractions.append)
    assert {p: p.read_bytes() for p in model.parent.rglob("*") if p.is_file()} == before
    assert fractions == sorted(fractions)
    assert name == "fsync" or fractions[-1] == 1


def test_classic_family_is_not_exported_to_gguf(tokenizer, tmp_path):
    classic = make_model("classic", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", classic.config, tokenizer, classic.to_arrays())
    result = tgen("export", tmp_path / "m", "--to", "gguf", "--out", tmp_path / "m.gguf")
    assert result.returncode == 1
    assert b"llama.cpp does not support post-norm layers" in result.stderr
    assert not (tmp_path / "m.gguf").exists()
    result = tgen("export", tmp_path / "m", "--to", "transformers", "--out", tmp_path / "again")
    assert result.returncode == 0, result.stderr
    assert not result.stdout
    first, last = result.stderr.decode().splitlines()[:2]
    assert "classic" in first
    assert "float32" in first or "f32" in first
    assert str(tmp_path / "again") in last


def test_default_file_name_is_the_model_name(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    model.rename("Qwen2.5-0.5B")
    assert run(["export", "Qwen2.5-0.5B/", "--to", "gguf"]) == 0
    fields = header.read_header(Path("Qwen2.5-0.5B-f32.gguf")).fields
    assert fields["general.name"] == "Qwen2.5-0.5B"
    assert run(["export", "Qwen2.5-0.5B-f32.gguf", "--to", "gguf", "--type", "f16"]) == 0
    assert Path("Qwen2.5-0.5B-f32-f16.gguf").exists()


def test_float64_weights_are_written_as_float32(model):
    path = model / "model.safetensors"
    wide = {name: array.astype(np.float64) for name, array in load_file(path).items()}
    path.write_bytes(save(wide, metadata={"format": "pt"}))
    before = model_with_adapter.load(model).arrays
    again = model_with_adapter.load(run_export(model, "--to", "gguf")).arrays
    assert all(np.array_equal(before[name], again[name]) for name in before)


@pytest.mark.parametrize("tokens", [{"bos_token_id": -1}, {"eos_token_id": [0, 99999, -3]}])
def test_invalid_special_token_ids_are_ignored(model, tokens):
    for name in ("config.json", "generation_config.json"):
        json_config = json.loads((model / name).read_bytes()) | tokens
        (model / name).write_text(json.dumps(json_config))
    assert model_with_adapter.load(model).end_ids == {0}
    fields = header.read_header(run_export(model, "--to", "gguf")).fields
    assert fields["tokenizer.ggml.bos_token_id"] == fields["tokenizer.ggml.eos_token_id"] == 0


@pytest.mark.parametrize("to", ["gguf", "transformers"])
def test_export_that_does_not_fit_names_the_target_and_the_reason(to, model, monkeypatch, capsys):
    monkeypatch.setattr(streams, "discard_stdout", lambda: None)
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = model.parent / "out"
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        status = run(["export", str(model), "--to", to, "--out", str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1
    assert f"error: {out}: {os.strerror(errno.EFBIG)}" in capsys.readouterr().err
    assert not out.exists()
