"""Cached weights are the packed ones, bit by bit; a file that does not fit is written again."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.models import cpu_engine, make_model
from tgen.checkpoint import export, model_dir
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix, Rows
from tgen.config import EngineOptions
from tgen.engine import weights_cache
from tgen.engine.cpu import job_layout, weights
from tgen.engine.cpu.weights import int8_panels, to_panels
from tgen.errors import ModelError
from tgen.loaded_model import open_model
from tgen.storage.sealed_file import encode_header, is_intact, open_sealed, publish_sealed

TOKENS = [[5, 6, 7, 8, 9, 10, 11]]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache directory, which does not exist yet."""
    monkeypatch.setattr(weights_cache, "cache_folder", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "weights"


@pytest.fixture
def save(tmp_path, tokenizer):
    """Save a model with files that are two minutes old."""

    def save_model(family="llama", name="model", **values):
        model = make_model(family, vocab_size=tokenizer.vocab_size, **values)
        model_dir.save(tmp_path / name, model.config, tokenizer, model.to_arrays())
        make_old(tmp_path / name)
        return tmp_path / name

    return save_model


def make_old(path, seconds=120.0):
    for file in path.iterdir() if path.is_dir() else [path]:
        os.utime(file, (time.time() - seconds,) * 2)


def logits(model):
    return model.engine.clone().extend(TOKENS, every_position=True)


def open_cpu(path, **how):
    """Open a model, and end its first text, after which its weights are stored."""
    model = open_model(path, EngineOptions(device="cpu", threads=1, **how))
    with model.borrow_engine():
        pass
    wait_for_store()
    return model


def wait_for_store():
    for thread in threading.enumerate():
        if thread.name == "weights-cache":
            thread.join()


def reads_weights(monkeypatch):
    """Return a list that gets an item per model whose arrays are read."""
    calls = []
    original = model_dir._read_weights
    monkeypatch.setattr(model_dir, "_read_weights", lambda *a: calls.append(a) or original(*a))
    return calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_cached_weights_equal_packed_ones(family, dtype, save, folder, monkeypatch):
    path = save(family)
    reads = reads_weights(monkeypatch)
    packed = open_cpu(path, dtype=dtype)
    (file,) = folder.iterdir()
    assert is_intact(file)
    table, blocks = packed.engine.weights.relocatable()
    assert bytes(open_sealed(file).content) == b"".join(blocks)
    cached = open_cpu(path, dtype=dtype)
    assert len(reads) == 1
    assert cached.engine.dtype == packed.engine.dtype == dtype
    assert cached.engine.cache_dtype == packed.engine.cache_dtype
    expected = packed.engine.weights.table
    for place, ours, theirs in zip(
        table.flat, cached.engine.weights.table.flat, expected.flat, strict=True
    ):
        assert (ours == 0) == (theirs == 0) == (place == 0)
    assert np.array_equal(logits(cached), logits(packed))
    fields = {"arrays": {}, "tokenizer": None}
    assert replace(cached.bundle, **fields) == replace(packed.bundle, **fields)
    assert cached._identity == packed._identity


@pytest.mark.parametrize("quantization", ["q8_0", "q4_0", "q4_1", "q6_k"])
def test_quantized_file_is_cached_in_its_own_dtype(save, tmp_path, quantization, folder):
    source, path = save(d_model=256), tmp_path / "model.gguf"
    bundle, how = model_dir.load(source), {"name": "m", "progress": lambda _: None}
    export.export_gguf(bundle, path, stored=quantization, **how)
    make_old(path)
    packed = open_cpu(path)
    cached = open_cpu(path)
    assert len(list(folder.iterdir())) == 1
    assert cached.engine.dtype == packed.engine.dtype == ("int4" if "4" in quantization else "int8")
    assert cached.bundle.quantized
    assert np.array_equal(logits(cached), logits(packed))


def test_dtype_of_the_file_by_name_is_the_same_entry(save, folder):
    path = save()
    open_cpu(path)
    open_cpu(path, dtype="float32")
    assert len(list(folder.iterdir())) == 1
    open_cpu(path, dtype="int8")
    assert open_cpu(path, dtype="int8").engine.dtype == "int8"
    assert open_cpu(path).engine.dtype == "float32"
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_changed_model_is_packed_again(save, name, monkeypatch):
    path = save()
    reads = reads_weights(monkeypatch)
    open_cpu(path)
    os.utime(path / name, (time.time() - 90,) * 2)
    open_cpu(path)
    open_cpu(path)
    assert len(reads) == 2


def test_header_counts_even_if_size_and_time_are_the_same(save, monkeypatch):
    path = save()
    reads = reads_weights(monkeypatch)
    before = logits(open_cpu(path))
    status = os.stat(path / "model.safetensors")
    content = (path / "model.safetensors").read_bytes()
    swapped = content.replace(b"layers.0.self", b"layers.X.self")
    swapped = swapped.replace(b"layers.1.self", b"layers.0.self")
    (path / "model.safetensors").write_bytes(swapped.replace(b"layers.X.self", b"layers.1.self"))
    os.utime(path / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    after = logits(open_cpu(path))
    assert len(reads) == 2
    assert not np.array_equal(before, after)


def test_other_code_and_other_machines_pack_again(save, monkeypatch):
    path = save()
    reads = reads_weights(monkeypatch)
    open_cpu(path)
    monkeypatch.setattr(weights_cache, "_code_digest", lambda: "other")
    open_cpu(path)
    monkeypatch.setattr(np, "__version__", "0.1")
    open_cpu(path)
    assert len(reads) == 3


def test_young_models_and_adapters_are_not_stored(save, folder, monkeypatch):
    path = save()
    make_old(path, 30)
    open_cpu(path)
    make_old(path)
    monkeypatch.setenv(weights_cache.SWITCH, "0")
    open_cpu(path)
    monkeypatch.delenv(weights_cache.SWITCH)
    bundle = model_dir.load(path)
    engine = cpu_engine(bundle.config, dict(bundle.arrays), n_threads=1)
    merged = replace(bundle, adapter=path)
    weights_cache.prepare_store(merged, engine.weights, n_weights=1, is_default=True)()
    os.utime(path / "config.json", (time.time() - 100,) * 2)  # after the bundle was read
    weights_cache.prepare_store(bundle, engine.weights, n_weights=1, is_default=True)()
    wait_for_store()
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content + b"\0",
        lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
        lambda content: bytes(len(content)),
        lambda _: b"X" * 100,
    ],
)
def test_damaged_file_is_written_again(save, folder, damage):
    path = save()
    expected = logits(open_cpu(path))
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert not is_intact(file)
    assert open_sealed(file) is None
    assert np.array_equal(logits(open_cpu(path)), expected)
    assert file.read_bytes() == content


def test_check_finds_one_changed_bit_and_removes_the_file(save, folder):
    path = save()
    open_cpu(path)
    (file,) = folder.iterdir()
    assert list(weights_cache.check()) == [(file, True)]
    content = file.read_bytes()
    at = len(content) - 200
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert open_sealed(file) is not None  # opening does not read the content
    assert list(weights_cache.check()) == [(file, False)]
    assert not file.exists()


def test_files_of_others_and_links_are_ignored(save, folder, tmp_path, monkeypatch):
    path = save()
    open_cpu(path)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o666)
    assert open_sealed(file) is None
    assert not weights_cache.cached_files()
    file.chmod(0o600)
    moved = tmp_path / "elsewhere"
    file.rename(moved)
    file.symlink_to(moved)
    assert open_sealed(file) is None
    before = moved.read_bytes()
    open_cpu(path)
    assert not file.is_symlink()
    assert moved.read_bytes() == before
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert open_sealed(file) is None
    assert weights_cache.find(path, None) is None


def test_least_recently_used_files_make_room(save, folder, monkeypatch):
    paths = [save(name=f"model{i}") for i in range(3)]
    open_cpu(paths[0])
    (first,) = folder.iterdir()
    monkeypatch.setattr(weights_cache, "LIMIT", 5 * first.stat().st_size // 2)
    os.utime(first, (0, 0))
    open_cpu(paths[1])
    (second,) = set(folder.iterdir()) - {first}
    os.utime(second, (1, 1))
    open_cpu(paths[0])  # counts as a use
    open_cpu(paths[2])
    assert first.exists()
    assert not second.exists()
    files = weights_cache.cached_files()
    assert len(files) == 2
    open_cpu(paths[1])  # both others were used within the hour
    assert weights_cache.cached_files() == files
    make_old(folder, 3700)
    monkeypatch.setattr(weights_cache, "LIMIT", first.stat().st_size - 1)
    open_cpu(paths[1])
    assert sorted(weights_cache.cached_files()) == sorted(files)
    weights_cache.clear()
    assert not weights_cache.cached_files()


def test_disk_without_room_costs_only_time(save, folder, monkeypatch):
    path = save()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_cache, "publish_sealed", fail)
    expected = logits(open_cpu(path))
    assert np.array_equal(logits(open_cpu(path)), expected)
    folder.chmod(0o777)  # not private
    open_cpu(path)
    assert not list(folder.iterdir())


def test_three_processes_fill_it_at_once(save, folder):
    path = save()
    code = (
        "import sys; from pathlib import Path; from tgen.engine import weights_cache\n"
        "weights_cache.cache_folder = lambda name: Path(sys.argv[2]) / name\n"
        "from tgen.config import EngineOptions; from tgen.loaded_model import open_model\n"
        "model = open_model(Path(sys.argv[1]), EngineOptions(device='cpu', threads=1))\n"
        "list(model.tokens([[5]], sampling=model.sampling({'max_new_tokens': 1})))\n"
        "model.engine.rewind([0])\n"
        f"sys.stdout.buffer.write(model.engine.extend({TOKENS}, every_position=True).tobytes())"
    )
    command = [sys.executable, "-c", code, str(path), str(folder.parent)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    outputs = {process.communicate()[0] for process in processes}
    assert outputs == {np.ascontiguousarray(logits(open_cpu(path))).tobytes()}
    assert len(list(folder.iterdir())) == 1


def test_model_that_changes_during_opening_is_read(save, monkeypatch):
    path = save()
    open_cpu(path)
    cached = weights_cache.find(path, None)
    make_old(path, 300)
    monkeypatch.setattr(weights_cache, "find", lambda *_: cached)
    reads = reads_weights(monkeypatch)
    open_cpu(path)
    assert len(reads) == 1


def test_weights_that_do_not_fit_into_ram_are_an_error(save, monkeypatch):
    path = save()
    open_cpu(path)
    monkeypatch.setattr("tgen.machine.memory.free_ram", lambda: 1000)
    with pytest.raises(ModelError, match="storing the weights as float32 needs"):
        weights_cache.find(path, None).map(
            model_dir.load(path, with_weights=False, tied_embeddings=True).config
        )


def test_cache_works_with_any_umask(save, monkeypatch):
    path = save()
    reads = reads_weights(monkeypatch)
    before = os.umask(0o002)
    try:
        open_cpu(path)
        open_cpu(path)
    finally:
        os.umask(before)
    assert len(reads) == 1


@pytest.mark.parametrize("header", [[], {}, {"key": 3}, {"key": {"header_bytes": "x"}}])
def test_sealed_file_with_another_header_is_ignored(header, save, folder):
    path = save()
    expected = logits(open_cpu(path))
    (file,) = folder.iterdir()
    publish_sealed(file, encode_header(header), [])
    assert np.array_equal(logits(open_cpu(path)), expected)
    assert open_sealed(file).header["dtype"] == "float32"


def test_only_files_of_the_cache_are_touched(save, folder, tmp_path):
    path = save()
    open_cpu(path)
    (file,) = folder.iterdir()
    other = folder / "mine.weights"
    other.write_bytes(b"x")
    (folder / f"{'0' * 16}.weights").mkdir()
    assert list(weights_cache.check()) == [(file, True)]
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    for change in (lambda: folder.symlink_to(elsewhere), lambda: elsewhere.chmod(0o777)):
        change()
        if not folder.exists():
            elsewhere.rename(folder)
        assert list(weights_cache.check()) == []
        weights_cache.clear()
        assert len(list(folder.iterdir())) == 3
        if folder.is_symlink():
            folder.unlink()
    folder.chmod(0o700)
    weights_cache.clear()
    assert len(list(folder.iterdir())) == 2
    assert other.read_bytes() == b"x"


def test_nothing_is_stored_before_the_first_text(save, folder):
    path = save()
    model = open_model(path, EngineOptions(device="cpu", threads=1))
    assert not folder.exists() or not list(folder.iterdir())
    list(model.tokens([[5]], sampling=model.sampling({"max_new_tokens": 1})))
    wait_for_store()
    assert is_intact(*folder.iterdir())


def test_model_of_a_relative_path_is_stored_after_a_change_of_directory(save, folder, monkeypatch):
    path = save()
    monkeypatch.chdir(path.parent)
    model = open_model(Path(path.name), EngineOptions(device="cpu", threads=1))
    monkeypatch.chdir("/")
    with model.borrow_engine():
        pass
    wait_for_store()
    assert is_intact(*folder.iterdir())


@pytest.mark.parametrize("smallest", [-128, -127, -50])
def test_blocks_of_eight_bits_are_not_quantized_again(smallest):
    rng = np.random.default_rng(0)
    numbers = rng.integers(smallest, -smallest, (20, 96)).astype(np.int8)
    numbers[:, ::32] = smallest
    scales = rng.uniform(0.001, 1, (20, 3)).astype(np.float16)
    blocks = [scales[..., None].view(np.uint8), numbers.reshape(20, 3, 32).view(np.uint8)]
    rows = np.concatenate(blocks, axis=2).reshape(20, -1)
    parts = [QuantizedMatrix([Rows(part, 8)], 96) for part in (rows[:7], rows[7:])]
    packed = weights._pack(QuantizedMatrix.stack(parts), job_layout.INT8)
    assert np.array_equal(packed, int8_panels(numbers, scales))
    if smallest == -127:  # what llama.cpp writes
        floats = numbers * scales.repeat(32, axis=1).astype(np.float32)
        assert np.array_equal(packed, to_panels(floats, job_layout.INT8))


def test_file_that_cannot_be_read_is_damaged(save, folder, monkeypatch):
    open_cpu(save())
    (file,) = folder.iterdir()

    def fail(_: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(weights_cache, "is_intact", fail)
    assert list(weights_cache.check()) == [(file, False)]
    assert not file.exists()
