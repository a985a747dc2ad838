"""safetensors files: same bytes and arrays as the library, and strict headers."""

import json
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from tgen.checkpoint import safetensors_file
from tgen.errors import ModelError
from tgen.runs import manifest
from tgen.storage import files


@pytest.mark.parametrize("large", [0, 1 << 30])  # bytes from which threads read
def test_read_arrays_equal_the_library(model_directory, monkeypatch, large):
    monkeypatch.setattr(safetensors_file, "_LARGE", large)
    path = model_directory / "model.safetensors"
    ours = safetensors_file.read_arrays(path, safetensors_file.read_header(path))
    library = load_file(path)
    assert ours.keys() == library.keys()
    assert all(np.array_equal(ours[name], library[name]) for name in ours)


def test_serialized_parts_equal_the_library_bytes():
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {
        "model/é": rng.random((3, 5), np.float32),
        "step/a": np.array(7.0, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "counts": rng.integers(0, 9, 7),
        "bytes": rng.integers(0, 9, 3).astype(np.uint8),
        "mask": np.array([True, False]),
        "transposed": rng.random((4, 6)).T,
    }
    contiguous = {n: a.copy(order="C") for n, a in arrays.items()}
    whole = save(contiguous, metadata={"format": "pt"})
    in_parts = safetensors_file.serialize_in_parts(arrays)
    assert b"".join(in_parts) == whole
    assert manifest.describe({"x": in_parts}) == manifest.describe({"x": whole})


def test_file_published_in_parts_is_complete(tmp_path):
    files.publish_folder(tmp_path / "a", {"x": [b"ab", memoryview(b""), memoryview(b"cd")]})
    assert files.read(tmp_path / "a" / "x") == b"abcd"


def test_failed_publish_keeps_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    files.publish(target, b"old")

    def fail(*_):
        raise OSError("disk full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="disk full"):
                files.publish(target, b"new")
        assert target.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["file"]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_mutated_headers_never_crash_or_pass_what_the_library_rejects(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("st")
    whole = save({"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)})
    n = int.from_bytes(whole[:8], "little")
    header = bytearray(whole[8 : 8 + n])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, n - 1))] = data.draw(st.integers(32, 126))
    path = folder / "x.safetensors"
    path.write_bytes(whole[:8] + bytes(header) + whole[8 + n :])
    try:
        ours = safetensors_file.read_arrays(path, safetensors_file.read_header(path))
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
def test_header_must_cover_the_file_exactly(tmp_path, offsets):
    shapes = {"a": [2, 3], "b": [4]}
    header = {
        n: {"dtype": "F32", "shape": shapes[n], "data_offsets": o} for n, o in offsets.items()
    }
    text = json.dumps(header).encode()
    size = max(end for _, end in offsets.values()) if offsets["b"][1] < 100 else 40
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ModelError, match=r"hole or an overlap|unreadable header|bytes \(expected"):
        safetensors_file.read_header(path)
