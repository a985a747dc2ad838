"""GGUF models in several files, and GGUF files that are not models."""

import numpy as np
import pytest

from support.models import make_model
from tgen.checkpoint import export, model_dir, model_files
from tgen.checkpoint.gguf.header import read_header
from tgen.checkpoint.stored_models import gguf_parts
from tgen.engine.weights_cache import _header_bytes
from tgen.errors import ModelError
from tgen.runs.remove_model import remove_model

gguf = pytest.importorskip("gguf", reason="NO GGUF: split files are not tested")


def copy(path, target, *, n_tensors=0, change=None, fields=None):
    """Write a GGUF file again with the gguf package, in parts of at most `n_tensors`."""
    source = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, "llama", split_max_tensors=n_tensors)
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            value = (fields or {}).get(field.name, field.contents())
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, value, field.types[0], sub_type)
    for name, value in (fields or {}).items():
        if name not in source.fields:
            writer.add_key_value(name, value, gguf.GGUFValueType.STRING)
    for tensor in source.tensors:
        if change is None or change(tensor.name):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def single(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    model = make_model("llama", vocab_size=tokenizer.vocab_size, n_layers=2)
    model_dir.save(folder / "model", model.config, tokenizer, model.to_arrays())
    path = folder / "single.gguf"
    bundle = model_dir.load(folder / "model")
    export.export_gguf(bundle, path, name="it", stored="q8_0", progress=lambda _: None)
    return path


@pytest.fixture
def parts(single, tmp_path):
    copy(single, tmp_path / "m.gguf", n_tensors=8)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_any_part_names_the_whole_model(single, parts):
    assert len(parts) > 2
    expected = model_dir.load(single)
    for part in (parts[0], parts[1], parts[-1]):
        bundle = model_dir.load(part)
        for name, array in expected.arrays.items():
            assert np.array_equal(bundle.arrays[name][:], array[:]), name
        assert bundle.tokenizer.encode(b"What is") == expected.tokenizer.encode(b"What is")
        assert len(bundle.stamp) == 3 * len(parts)
    assert model_files.model_files(parts[1]) == parts == gguf_parts(parts[2])
    assert all(0 < _header_bytes(part) <= part.stat().st_size for part in parts)


def test_missing_parts_are_named(parts):
    parts[1].unlink()
    with pytest.raises(ModelError, match=rf"one of {len(parts)} parts, and {parts[1].name} is"):
        model_dir.load(parts[0])


def test_parts_of_different_models_are_an_error(parts):
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelError, match=r"has the number 2 of \d \(expected 1 of"):
        model_dir.load(parts[0])


def test_a_renamed_part_says_how_parts_are_named(parts, tmp_path):
    (tmp_path / "other.gguf").write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelError, match="its name does not say which"):
        read_header(tmp_path / "other.gguf")


def test_all_parts_are_removed(parts, tmp_path):
    remove_model(parts[1])
    assert not [*tmp_path.glob("m-*")]


@pytest.mark.parametrize(
    ("fields", "keep", "reason"),
    [
        ({"general.type": "adapter"}, "ffn", "a LoRA adapter for llama.cpp"),
        ({"general.type": "imatrix"}, "ffn", "an importance matrix"),
        ({"general.type": "mmproj"}, "ffn", "encoder of a model"),
        ({}, "no tensor", "a vocabulary, but no weights"),
    ],
)
def test_files_that_are_not_models_are_named(fields, keep, reason, single, tmp_path):
    path = tmp_path / "other.gguf"
    copy(single, path, fields=fields, change=lambda name: keep in name)
    with pytest.raises(ModelError, match=reason):
        model_dir.load(path)
