"""A state is written from the arrays as they lie in memory: the library's bytes all the same."""

import numpy as np

from tgen.checkpoint import safetensors_file
from tgen.runs.storage import manifest
from tgen.storage import files


def test_parts_are_the_librarys_bytes():
    draws = np.random.default_rng(0)
    arrays = {
        "model/é": draws.random((3, 5), np.float32),
        "step/a": np.array(7.0, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "counts": draws.integers(0, 9, 7),
        "bytes": draws.integers(0, 9, 3).astype(np.uint8),
        "mask": np.array([True, False]),
        "transposed": draws.random((4, 6)).T,
    }
    whole = safetensors_file.serialize({n: a.copy(order="C") for n, a in arrays.items()})
    in_parts = safetensors_file.in_parts(arrays)
    assert b"".join(in_parts) == whole
    assert manifest.describe({"x": in_parts}) == manifest.describe({"x": whole})


def test_a_file_written_in_parts_is_whole(tmp_path):
    files.publish_folder(tmp_path / "a", {"x": [b"ab", memoryview(b""), memoryview(b"cd")]})
    assert files.read(tmp_path / "a" / "x") == b"abcd"
