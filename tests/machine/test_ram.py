"""Free RAM, and the refusal of models that do not fit."""

from types import SimpleNamespace

import numpy as np
import pytest

from support.command import tgen
from support.models import make_model
from tgen.checkpoint import model_dir, safetensors_file
from tgen.checkpoint.gguf import reader
from tgen.config import EngineOptions
from tgen.engine.open_engine import open_engine
from tgen.errors import ModelError
from tgen.machine import memory
from tgen.model.transformer import Transformer

GIB = 1 << 30


@pytest.fixture
def container(tmp_path):
    """Return the root of a simulated container with 2 GiB, of which 1.5 are in use."""
    contents = {
        "proc/self/cgroup": "0::/",
        "proc/self/status": "Name:\tpython\nRssAnon:\t  1024 kB\n",
        "sys/fs/cgroup/memory.max": str(2 * GIB),
        "sys/fs/cgroup/memory.current": str(3 * GIB // 2),
    }
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_free_ram_is_the_rest_of_the_container(container, monkeypatch):
    assert memory.free_ram(container) == GIB // 2
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": GIB // 4}
    # Only for this module: the thread that watches the load uses it too.
    monkeypatch.setattr(memory, "os", SimpleNamespace(sysconf=sizes.get))
    assert memory.free_ram(container) == GIB // 4 - (
        1 << 20
    )  # a small machine, less its own memory
    (container / "sys/fs/cgroup/memory.max").write_text("max")
    (container / "proc/self/status").unlink()
    assert memory.free_ram(container) == GIB // 4
    monkeypatch.setattr(memory, "os", SimpleNamespace())
    assert memory.free_ram(container) is None


@pytest.fixture
def saved(tokenizer, tmp_path):
    """Return the directory of a model of 300 KB and its size in bytes."""
    model = make_model("llama", vocab_size=tokenizer.vocab_size, d_model=64)
    arrays = model.to_arrays()
    model_dir.save(tmp_path / "m", model.config, tokenizer, arrays)
    return tmp_path / "m", sum(array.nbytes for array in arrays.values())


def test_model_that_does_not_fit_is_not_read(saved, monkeypatch):
    path, n_bytes = saved
    monkeypatch.setattr(memory, "free_ram", lambda: n_bytes)
    assert model_dir.load(path).arrays
    monkeypatch.setattr(memory, "free_ram", lambda: n_bytes - 1)
    monkeypatch.setattr(safetensors_file, "read_arrays", None)
    with pytest.raises(ModelError, match=r"loading .* needs \d+\.\d KB of memory, but only"):
        model_dir.load(path)


def test_gguf_file_that_does_not_fit_is_not_read(saved, monkeypatch):
    pytest.importorskip("gguf")
    path, _ = saved
    gguf = path.with_name("m.gguf")
    result = tgen("export", path, "--to", "gguf", "--type", "q8_0", "--out", gguf)
    assert result.returncode == 0, result.stderr.decode()
    monkeypatch.setattr(memory, "free_ram", lambda: gguf.stat().st_size // 2)  # it stays quantized
    monkeypatch.setattr(reader, "read_tensors", None)
    with pytest.raises(ModelError, match="loading"):
        model_dir.load(gguf)


def test_wider_weights_that_do_not_fit_are_not_made(saved, monkeypatch):
    bundle = model_dir.load(saved[0])
    narrow = {name: array.astype(np.float16) for name, array in bundle.arrays.items()}
    n_more = sum(array.nbytes for array in narrow.values())
    for free in (n_more, n_more - 1):
        monkeypatch.setattr(memory, "free_ram", lambda free=free: free)
        object.__setattr__(bundle, "arrays", dict(narrow))
        if free == n_more:
            open_engine(bundle, EngineOptions(device="cpu", dtype="float32"))
        else:
            with pytest.raises(ModelError, match="storing the weights as float32 needs"):
                open_engine(bundle, EngineOptions(device="cpu", dtype="float32"))
    with pytest.raises(ModelError, match="converting the weights to float32 needs"):
        Transformer.from_arrays(bundle.config, narrow)


@pytest.mark.parametrize("kind", ["kernels", "torch"])
def test_kv_cache_that_does_not_fit_is_not_allocated(saved, monkeypatch, kind):
    engine = open_engine(model_dir.load(saved[0]), EngineOptions(device="cpu", kind=kind))
    before = engine.extend([[1, 2]])
    monkeypatch.setattr(memory, "_SMALL_CACHE", 1)
    monkeypatch.setattr(memory, "free_ram", lambda: 1)
    with pytest.raises(ModelError, match=r"KV cache of \d texts of .* tokens needs .*, but only"):
        engine.select([0] * 8)
    engine.rewind([0])
    assert np.array_equal(engine.extend([[1, 2]]), before)  # unchanged
