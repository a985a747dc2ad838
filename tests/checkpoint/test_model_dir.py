"""Model directories: save and load, and errors for damaged ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from support.models import make_model
from tgen.checkpoint import model_dir, safetensors_file
from tgen.errors import ModelError, TgenError
from tgen.model.transformer import Transformer
from tgen.storage import files
from tgen.tokenizer import train_char


def test_loaded_model_equals_saved_model(model_directory, family):
    model = make_model(family, vocab_size=300)
    bundle = model_dir.load(model_directory)
    assert bundle.config == model.config
    assert bundle.end_ids == {0}
    again = Transformer.from_arrays(bundle.config, bundle.arrays)
    tokens = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))


def test_saving_replaces_the_weights(model_directory, family, tokenizer):
    other = make_model(family, seed=1, vocab_size=tokenizer.vocab_size)
    model_dir.save(model_directory, other.config, tokenizer, other.to_arrays())
    arrays = model_dir.load(model_directory).arrays
    assert all(np.array_equal(arrays[name], a) for name, a in other.to_arrays().items())
    assert not list(model_directory.glob(files.TEMPORARY + "*"))


def test_replacing_a_model_removes_its_other_files_and_no_others(tmp_path, tokenizer):
    old, new = (make_model("llama", vocab_size=300, d_model=width) for width in (16, 32))
    out = tmp_path / "m"
    model_dir.save(out, old.config, tokenizer, old.to_arrays())
    theirs = [
        "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "merges.txt", "tokenizer.model", "model.safetensors.index.json", "adapter_config.json",
        "model-00001-of-00002.safetensors", "ngrams.safetensors",
    ]  # fmt: skip
    mine = ["notes.txt", "README.md", "model.gguf", "my.safetensors", "training"]
    for name in [*theirs, *mine[:-1]]:
        (out / name).write_bytes(b"{}")
    (out / "training").mkdir()
    model_dir.save(out, new.config, tokenizer, new.to_arrays())
    fresh = tmp_path / "fresh"
    model_dir.save(fresh, new.config, tokenizer, new.to_arrays())
    assert {path.name for path in out.iterdir()} == {p.name for p in fresh.iterdir()} | set(mine)
    (out / "chat_template.jinja").write_text("added by hand")
    model_dir.save(
        out, new.config, tokenizer, make_model("llama", seed=1, vocab_size=300).to_arrays()
    )
    assert (out / "chat_template.jinja").exists()  # only the weights have changed


def edit(path: Path, **values: object) -> None:
    json_config = json.loads(path.read_bytes()) | values
    path.write_text(json.dumps({k: v for k, v in json_config.items() if v != "absent"}))


def rewrite(folder: Path, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Change the embedding."""
    path = folder / "model.safetensors"
    arrays = load_file(path)
    name = next(name for name in arrays if name.endswith(("embed_tokens.weight", "wte.weight")))
    path.write_bytes(safetensors_file.serialize(arrays | {name: change(arrays[name])}))


def add_head(folder: Path) -> None:
    path = folder / "model.safetensors"
    arrays = load_file(path)
    head = {"lm_head.weight": np.ones((300, 32), np.float32)}
    path.write_bytes(safetensors_file.serialize(arrays | head))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
DAMAGE = {
    "missing directory": lambda d: shutil.rmtree(d),
    "empty directory": lambda d: [p.unlink() for p in d.iterdir()],
    "missing config": lambda d: (d / "config.json").unlink(),
    "config is invalid JSON": lambda d: (d / "config.json").write_bytes(b"\xff{"),
    "config is a list": lambda d: (d / "config.json").write_text("[]"),
    "unknown model type": lambda d: edit(d / "config.json", model_type="bert"),
    "missing model type": lambda d: edit(d / "config.json", model_type="absent"),
    "model type is a list": lambda d: edit(d / "config.json", model_type=["gpt2"]),
    "n_heads not divisible": lambda d: edit(
        d / "config.json", n_head=5, num_key_value_heads=3, head_dim=8
    ),
    "negative size": lambda d: edit(d / "config.json", vocab_size=-1),
    "size is text": lambda d: edit(d / "config.json", vocab_size="many"),
    "wrong vocab_size": lambda d: edit(d / "config.json", vocab_size=301),
    "size is true": lambda d: edit(d / "config.json", n_layer=True, num_hidden_layers=True),
    "one layer too many": lambda d: edit(d / "config.json", n_layer=3, num_hidden_layers=3),
    "billions of layers": lambda d: edit(
        d / "config.json", n_layer=1 << 30, num_hidden_layers=1 << 30
    ),
    "one layer too few": lambda d: edit(d / "config.json", n_layer=1, num_hidden_layers=1),
    "missing d_model": lambda d: edit(d / "config.json", n_embd="absent", hidden_size="absent"),
    "missing weights": lambda d: (d / "model.safetensors").unlink(),
    "empty weights": lambda d: (d / "model.safetensors").write_bytes(b""),
    "weights one byte short": lambda d: (d / "model.safetensors").write_bytes(
        (d / "model.safetensors").read_bytes()[:-1]
    ),
    "weights one byte long": lambda d: (d / "model.safetensors").write_bytes(
        (d / "model.safetensors").read_bytes() + b"x"
    ),
    "weights are a Git LFS pointer": lambda d: (d / "model.safetensors").write_text(POINTER),
    "weights are a folder": lambda d: [
        (d / "model.safetensors").unlink(),
        (d / "model.safetensors").mkdir(),
    ],
    "index leads outside": lambda d: [
        (d / "model.safetensors").unlink(),
        (d / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../x.safetensors"}}'
        ),
    ],
    "missing shard": lambda d: [
        (d / "model.safetensors").unlink(),
        (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}'),
    ],
    "config is a Git LFS pointer": lambda d: (d / "config.json").write_text(POINTER),
    "tokenizer is a Git LFS pointer": lambda d: (d / "tokenizer.json").write_text(POINTER),
    "only pickle files": lambda d: [
        (d / "model.safetensors").rename(d / "pytorch_model.bin"),
    ],
    "quantized weights": lambda d: edit(
        d / "config.json", quantization_config={"quant_method": "gptq"}
    ),
    "unknown RoPE type": lambda d: edit(
        d / "config.json",
        scale_attn_weights=False,  # the error of gpt2, which has no RoPE
        rope_parameters={"rope_type": "yarn", "factor": 4.0},
    ),
    "sliding-window layers": lambda d: edit(
        d / "config.json", layer_types=["sliding_attention"], n_embd=7
    ),
    "integer weights": lambda d: rewrite(d, lambda a: a.astype(np.int32)),
    "NaN weight": lambda d: rewrite(d, lambda a: a * np.float32("nan")),
    "infinite weight": lambda d: rewrite(d, lambda a: a + np.float32("inf")),
    "head differs from the tied embedding": lambda d: add_head(d),
    "contradictory RoPE parameters": lambda d: edit(
        d / "config.json", rope_theta=123.0, scale_attn_weights=False
    ),
    "RoPE parameters are a list": lambda d: edit(
        d / "config.json", rope_parameters=[1], scale_attn_weights=False
    ),
    "missing index": lambda d: (d / "model.safetensors").rename(
        d / "model-00001-of-00002.safetensors"
    ),
    "transposed weight": lambda d: rewrite(d, lambda a: np.ascontiguousarray(a.T)),
    "missing tokenizer": lambda d: (d / "tokenizer.json").unlink(),
    "invalid tokenizer": lambda d: (d / "tokenizer.json").write_text("{"),
}


@pytest.mark.parametrize("family", ["qwen3", "gpt2"], indirect=True)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_directory_is_an_error_with_a_hint(model_directory, damage):
    damage(model_directory)
    with pytest.raises(TgenError) as caught:
        model_dir.load(model_directory)
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("family", ["classic", "llama"], indirect=True)
def test_missing_tensor_is_named(model_directory):
    path = model_directory / "model.safetensors"
    arrays = load_file(path)
    for name in arrays:
        path.write_bytes(safetensors_file.serialize({n: a for n, a in arrays.items() if n != name}))
        if "positions_embed" in name:  # tgen computes them
            model_dir.load(model_directory)
            continue
        with pytest.raises(ModelError, match="is missing"):
            model_dir.load(model_directory)


@pytest.mark.parametrize("family", ["gpt2"], indirect=True)
def test_saved_masks_are_ignored(model_directory):
    path = model_directory / "model.safetensors"
    masks = {
        "h.0.attn.bias": np.tril(np.ones((48, 48), np.uint8)),
        "h.0.attn.masked_bias": np.array(-np.inf, np.float32),
    }
    before = model_dir.load(model_directory).arrays
    arrays = {f"transformer.{name}": array for name, array in (load_file(path) | masks).items()}
    path.write_bytes(safetensors_file.serialize(arrays))
    after = model_dir.load(model_directory).arrays
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_classic_model_with_learned_positions_keeps_them(tokenizer, tmp_path):
    model = make_model("classic", position="learned", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    bundle = model_dir.load(tmp_path / "m")
    assert bundle.config.position == "learned"
    assert "position_embedding.weight" in bundle.arrays


def test_load_during_replacement_gives_the_old_or_the_new_model(tmp_path, monkeypatch):
    tokenizers = [train_char([text.encode()]) for text in ("é", "ü")]
    models = [make_model("llama", seed=n, vocab_size=tokenizers[0].vocab_size) for n in (0, 1)]
    read_weights, n_replaced, max_replaced = model_dir._read_weights, 0, 0

    def save(n: int) -> None:
        model_dir.save(tmp_path / "m", models[n].config, tokenizers[n], models[n].to_arrays())

    def replace_and_read(*arguments):
        nonlocal n_replaced
        if n_replaced < max_replaced:
            n_replaced += 1
            save(n_replaced % 2)
        return read_weights(*arguments)

    save(0)
    monkeypatch.setattr(model_dir, "_read_weights", replace_and_read)
    for limit in (1, 2):
        max_replaced = limit
        bundle = model_dir.load(tmp_path / "m")
        (n,) = [n for n in (0, 1) if bundle.tokenizer.json == tokenizers[n].json]
        expected = models[n].to_arrays()
        assert all(np.array_equal(bundle.arrays[name], expected[name]) for name in expected)
    max_replaced = 1_000
    with pytest.raises(ModelError, match="keeps changing while it is read"):
        model_dir.load(tmp_path / "m")


def test_load_retries_if_the_model_was_missing_for_a_moment(tmp_path, monkeypatch):
    tokenizer = train_char([b"abcd"])
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    path = tmp_path / "m"
    model_dir.save(path, model.config, tokenizer, model.to_arrays())
    read_weights, n_reads = model_dir._read_weights, 0

    def fail_first(*arguments):
        nonlocal n_reads
        n_reads += 1
        if n_reads == 1:
            content = (path / "config.json").read_bytes()
            (path / "config.json").unlink()
            (path / "config.json").write_bytes(content)
            raise ModelError("another model's weights")
        return read_weights(*arguments)

    monkeypatch.setattr(model_dir, "_read_weights", fail_first)
    assert model_dir.load(path).config == model.config
    assert n_reads == 2


def test_training_that_never_began_is_named(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "LOCK").touch()
    with pytest.raises(ModelError) as caught:
        model_dir.load(tmp_path)
    assert "was stopped before it began, start it again" in caught.value.hint


def test_files_of_a_model_and_of_its_run_are_not_for_output(tokenizer, tmp_path):
    folder, model = tmp_path / "m", make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(folder, model.config, tokenizer, model.to_arrays())
    names = ["config.json", "tokenizer.json", "model.safetensors", "new.safetensors", "vocab.json"]
    (folder / "training").mkdir()
    (folder / "training" / "run.json").touch()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "link.csv").symlink_to(folder / "config.json")
    kept = [folder / name for name in [*names, "training/run.json"]]
    for path in [*kept, tmp_path / "model.gguf", tmp_path / "link.csv"]:
        assert model_dir.belongs_to_a_model(path)
    (tmp_path / "results").mkdir()
    free = [folder / "page.html", folder / "bench.json", tmp_path / "results" / "config.json"]
    for path in [*free, tmp_path / "new.gguf", folder, Path("/dev/null")]:
        assert not model_dir.belongs_to_a_model(path)
