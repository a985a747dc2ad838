"""The kernels' object file: damaged or missing, in a private directory only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import tgen
from tgen.checkpoint.model_lookup import shipped_model
from tgen.engine.cpu import compiler, kernel_cache


def run_generate(*more: str, **environment: str) -> tuple[bytes, str]:
    """Run `tgen generate`; return stdout and stderr."""
    options = ["--prompt", "What is", "-t", "0", "-n", "20", "--device", "cpu", *more]
    result = tgen("generate", "--model", shipped_model(), *options, **environment)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout, result.stderr.decode()


def test_command_writes_the_same_text_without_kernels_or_a_cache_directory(tmp_path: Path):
    text, messages = run_generate()
    torch_text, torch_messages = run_generate(TGEN_KERNELS="0")
    assert torch_text == text
    assert "using torch" in torch_messages
    assert "using torch" not in messages
    (tmp_path / "file").write_bytes(b"")
    cpu = {}  # recompiled in any case: therefore also for narrower vectors
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and {"avx2", "fma"} <= set(cpuinfo.read_text().split()):
        cpu = {"TGEN_CPU_NAME": "haswell", "TGEN_CPU_FEATURES": "+avx2,+fma"}
    int8_text, _ = run_generate("--dtype", "int8")
    no_cache = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    uncached_text, messages = run_generate("--dtype", "int8", **no_cache, **cpu)
    assert uncached_text == int8_text, messages
    assert "compiling kernels" in messages


def test_damaged_object_file_is_recompiled(tmp_path: Path, monkeypatch):
    kernel_cache.enter_function()  # compiles if necessary
    code = kernel_cache.read_object(None)
    assert code is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kernel_cache.object_path(None)
    assert path is not None
    kernel_cache.store_object(None, code)
    content = path.read_bytes()
    path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    compiled = []
    monkeypatch.setattr(compiler, "machine_code", lambda *what: compiled.append(what) or code)
    for _ in range(2):
        monkeypatch.setattr(kernel_cache, "_loaded", {})
        kernel_cache.enter_function()
        assert len(compiled) == 1  # the second finds the new file
        assert path.read_bytes() == content


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot choose a CPU")
def test_two_threads_finish_on_one_busy_cpu():
    code = """
import os, subprocess, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    from tgen.python_api import Model
    from tgen.checkpoint import model_dir
    from tgen.checkpoint.model_lookup import shipped_model
    from tgen.engine.cpu.engine import CpuEngine
    from tgen.engine.cpu.weights import pack_weights
    from tgen.loaded_model import LoadedModel
    bundle = model_dir.load(shipped_model())
    weights = pack_weights(bundle.config, dict(bundle.arrays), "float32", n_threads=2)
    model = Model(LoadedModel(bundle, CpuEngine(weights, n_threads=2)))
    print(end=model.generate("What is", max_new_tokens=20, temperature=0))
finally:
    for process in busy:
        process.kill()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=900
    )
    assert result.stdout == run_generate()[0]


@pytest.mark.parametrize("home", [None, "", "~", "relative"])
def test_without_an_absolute_home_there_is_no_cache(tmp_path, monkeypatch, home):
    """Python returns "~" for a user without an entry in the password file, as in containers."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if home:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert kernel_cache.object_path(None) is None
    assert kernel_cache.read_object(None) is None
    kernel_cache.store_object(None, b"code")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["TGEN_CPU_NAME", "TGEN_CPU_FEATURES"])
def test_name_of_the_object_file_depends_on_the_cpu(monkeypatch, name):
    paths = {kernel_cache.object_path(None)}
    for value in ("haswell", "znver4"):
        monkeypatch.setenv(name, value)
        paths.add(kernel_cache.object_path(None))
    assert len(paths) == 3


def test_object_file_that_others_can_write_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0o002)
    try:
        kernel_cache.store_object(None, b"code")
    finally:
        os.umask(before)
    assert kernel_cache.read_object(None) == b"code"
    kernel_cache.object_path(None).chmod(0o660)
    assert kernel_cache.read_object(None) is None


def test_least_recently_used_object_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = kernel_cache.object_path(None).parent
    folder.mkdir(mode=0o700, parents=True)
    names = [f"{i:016x}-enter.o" for i in range(kernel_cache.MAX_FILES + 3)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (i, i))
    (folder / "notes.o").write_bytes(b"")
    kernel_cache.store_object(None, b"code")
    assert kernel_cache.read_object(None) == b"code"
    path = kernel_cache.object_path(None)
    assert {path.name for path in folder.iterdir()} == {*names[4:], "notes.o", path.name}
    os.utime(path, (0, 0))
    kernel_cache.read_object(None)  # counts as a use
    assert path.stat().st_mtime > 0
