"""Model directories: what is written is read, and what is damaged is refused with a reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file

from support.models import make_model
from tgen.checkpoint import model_dir, safetensors_file
from tgen.errors import ModelError, TgenError
from tgen.model.transformer import Transformer
from tgen.storage import files


def test_saved_equals_loaded(model_directory, family):
    model = make_model(family, vocab_size=300)
    bundle = model_dir.load(model_directory)
    assert bundle.config == model.config
    assert bundle.end_ids == {0}
    again = Transformer.from_arrays(bundle.config, bundle.arrays)
    tokens = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))


def test_the_reader_equals_the_library(model_directory):
    path = model_directory / "model.safetensors"
    ours, library = safetensors_file.read(path, safetensors_file.read_header(path)), load_file(path)
    assert ours.keys() == library.keys()
    assert all(np.array_equal(ours[name], library[name]) for name in ours)


def test_new_weights_replace_the_old_at_once(model_directory, family, tokenizer):
    other = make_model(family, seed=1, vocab_size=tokenizer.vocab_size)
    model_dir.save(model_directory, other.config, tokenizer, other.to_arrays())
    arrays = model_dir.load(model_directory).arrays
    assert all(np.array_equal(arrays[name], a) for name, a in other.to_arrays().items())
    assert not list(model_directory.glob(files.TEMPORARY + "*"))


def edit(path: Path, **values: object) -> None:
    described = json.loads(path.read_bytes()) | values
    path.write_text(json.dumps({k: v for k, v in described.items() if v != "absent"}))


def rewrite(folder: Path, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Changes the weights of one norm or matrix."""
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
    "no directory": lambda d: shutil.rmtree(d),
    "an empty one": lambda d: [p.unlink() for p in d.iterdir()],
    "no config": lambda d: (d / "config.json").unlink(),
    "config is no JSON": lambda d: (d / "config.json").write_bytes(b"\xff{"),
    "config is a list": lambda d: (d / "config.json").write_text("[]"),
    "a foreign type": lambda d: edit(d / "config.json", model_type="bert"),
    "no type": lambda d: edit(d / "config.json", model_type="absent"),
    "a type that is a list": lambda d: edit(d / "config.json", model_type=["gpt2"]),
    "heads that do not divide": lambda d: edit(
        d / "config.json", n_head=5, num_key_value_heads=3, head_dim=8
    ),
    "a negative size": lambda d: edit(d / "config.json", vocab_size=-1),
    "a size in words": lambda d: edit(d / "config.json", vocab_size="many"),
    "another vocabulary": lambda d: edit(d / "config.json", vocab_size=301),
    "a size as true": lambda d: edit(d / "config.json", n_layer=True, num_hidden_layers=True),
    "one layer more": lambda d: edit(d / "config.json", n_layer=3, num_hidden_layers=3),
    "layers beyond number": lambda d: edit(
        d / "config.json", n_layer=1 << 30, num_hidden_layers=1 << 30
    ),
    "one layer less": lambda d: edit(d / "config.json", n_layer=1, num_hidden_layers=1),
    "no width": lambda d: edit(d / "config.json", n_embd="absent", hidden_size="absent"),
    "no weights": lambda d: (d / "model.safetensors").unlink(),
    "empty weights": lambda d: (d / "model.safetensors").write_bytes(b""),
    "short weights": lambda d: (d / "model.safetensors").write_bytes(
        (d / "model.safetensors").read_bytes()[:-1]
    ),
    "long weights": lambda d: (d / "model.safetensors").write_bytes(
        (d / "model.safetensors").read_bytes() + b"x"
    ),
    "a Git LFS pointer": lambda d: (d / "model.safetensors").write_text(POINTER),
    "a folder as weights": lambda d: [
        (d / "model.safetensors").unlink(),
        (d / "model.safetensors").mkdir(),
    ],
    "an index that leads outside": lambda d: [
        (d / "model.safetensors").unlink(),
        (d / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../x.safetensors"}}'
        ),
    ],
    "a missing shard": lambda d: [
        (d / "model.safetensors").unlink(),
        (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}'),
    ],
    "a pointer for config.json": lambda d: (d / "config.json").write_text(POINTER),
    "a pointer for the tokenizer": lambda d: (d / "tokenizer.json").write_text(POINTER),
    "pickles alone": lambda d: [
        (d / "model.safetensors").rename(d / "pytorch_model.bin"),
    ],
    "quantised weights": lambda d: edit(
        d / "config.json", quantization_config={"quant_method": "gptq"}
    ),
    "an unknown rope": lambda d: edit(
        d / "config.json",
        scale_attn_weights=False,  # what gpt2 could have in its place
        rope_parameters={"rope_type": "yarn", "factor": 4.0},
    ),
    "some layers that slide": lambda d: edit(
        d / "config.json", layer_types=["sliding_attention"], n_embd=7
    ),
    "weights that are whole numbers": lambda d: rewrite(d, lambda a: a.astype(np.int32)),
    "a weight that is NaN": lambda d: rewrite(d, lambda a: a * np.float32("nan")),
    "a weight that is infinite": lambda d: rewrite(d, lambda a: a + np.float32("inf")),
    "a head that is not the embedding it is tied to": lambda d: add_head(d),
    "rope parameters that disagree": lambda d: edit(
        d / "config.json", rope_theta=123.0, scale_attn_weights=False
    ),
    "rope parameters that are a list": lambda d: edit(
        d / "config.json", rope_parameters=[1], scale_attn_weights=False
    ),
    "an index that is missing": lambda d: (d / "model.safetensors").rename(
        d / "model-00001-of-00002.safetensors"
    ),
    "a transposed weight": lambda d: rewrite(d, lambda a: np.ascontiguousarray(a.T)),
    "no tokenizer": lambda d: (d / "tokenizer.json").unlink(),
    "a broken tokenizer": lambda d: (d / "tokenizer.json").write_text("{"),
}


@pytest.mark.parametrize("family", ["qwen3", "gpt2"], indirect=True)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_directory_is_refused_with_a_hint(model_directory, damage):
    damage(model_directory)
    with pytest.raises(TgenError) as caught:
        model_dir.load(model_directory)
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("family", ["classic", "llama"], indirect=True)
def test_each_missing_tensor_is_named(model_directory):
    path = model_directory / "model.safetensors"
    arrays = load_file(path)
    for name in arrays:
        path.write_bytes(safetensors_file.serialize({n: a for n, a in arrays.items() if n != name}))
        if "positions_embed" in name:  # a copy of what is computed
            model_dir.load(model_directory)
            continue
        with pytest.raises(ModelError, match="is missing"):
            model_dir.load(model_directory)


@pytest.mark.parametrize("family", ["gpt2"], indirect=True)
def test_masks_that_older_versions_saved_are_passed_over(model_directory):
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


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_mutated_headers_never_crash_nor_pass_what_the_library_refuses(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("st")
    whole = safetensors_file.serialize(
        {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}
    )
    n = int.from_bytes(whole[:8], "little")
    header = bytearray(whole[8 : 8 + n])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, n - 1))] = data.draw(st.integers(32, 126))
    path = folder / "x.safetensors"
    path.write_bytes(whole[:8] + bytes(header) + whole[8 + n :])
    try:
        ours = safetensors_file.read(path, safetensors_file.read_header(path))
    except ModelError:
        return
    library = load_file(path)
    assert ours.keys() == library.keys()
    for name, array in ours.items():
        assert array.tobytes() == library[name].tobytes()


@pytest.mark.parametrize(
    "offsets",
    [
        {"a": [0, 24], "b": [20, 36]},  # an overlap
        {"a": [0, 24], "b": [28, 44]},  # a hole
        {"a": [0, 24], "b": [24, 36]},  # fewer bytes than the shape
        {"a": [0, 24], "b": [40, 24]},
        {"a": [-24, 0], "b": [0, 16]},
        {"a": [0, 24], "b": [24, 1 << 62]},
    ],
)
def test_tensors_must_cover_the_file_exactly(tmp_path, offsets):
    shapes = {"a": [2, 3], "b": [4]}
    header = {
        n: {"dtype": "F32", "shape": shapes[n], "data_offsets": o} for n, o in offsets.items()
    }
    text = json.dumps(header).encode()
    size = max(end for _, end in offsets.values()) if offsets["b"][1] < 100 else 40
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ModelError, match=r"hole or an overlap|unreadable header|its header says"):
        safetensors_file.read_header(path)


def test_a_foreign_model_keeps_its_learned_positions(tokenizer, tmp_path):
    model = make_model("classic", position="learned", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    bundle = model_dir.load(tmp_path / "m")
    assert bundle.config.position == "learned"
    assert "position_embedding.weight" in bundle.arrays


def test_publishing_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    target = tmp_path / "file"
    files.publish(target, b"old")

    def fail(*_):
        raise OSError("disk full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, fail)
            with pytest.raises(OSError, match="disk full"):
                files.publish(target, b"new")
        assert target.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
