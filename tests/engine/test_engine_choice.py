"""Which engine computes, that all of them write the same text, and what is said about it."""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tgen import engine
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import SamplingConfig
from tgen.engine.cpu import kernel_cache
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.cpu.weights import to_bfloat16
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.generation.loop import generate
from tgen.model.transformer import Transformer

BUNDLE = model_dir.load(shipped_model())
GREEDY = SamplingConfig(temperature=0, max_new_tokens=200)


def test_greedy_texts_are_those_of_the_torch_engine():
    tokenizer = BUNDLE.tokenizer
    starts = b"What is|The king|ROMEO:|O, |To be|I am|My lord|Enter|Come|Why".split(b"|")
    prompts = [tokenizer.encode_prompt(start + end) for start in starts for end in (b"", b" the")]
    reference = TorchEngine(Transformer.from_arrays(BUNDLE.config, BUNDLE.arrays))
    mine = CpuEngine(BUNDLE.config, dict(BUNDLE.arrays), n_threads=2)
    texts = []
    for one in (reference, mine):
        found: list[list[int]] = [[] for _ in prompts]
        for token in generate(one, prompts, sampling=GREEDY):
            found[token.row].append(token.id)
        texts.append(found)
    for prompt, wanted, found in zip(prompts, *texts, strict=True):
        if wanted != found:  # only where two tokens are as good as equal
            at = next(
                i for i, pair in enumerate(zip(wanted, found, strict=True)) if len(set(pair)) > 1
            )
            mine.rewind([0])
            mine.select([0])
            logits = mine.extend([(prompt + wanted[:at])[-BUNDLE.config.context_length :]])[0]
            assert abs(logits[wanted[at]] - logits[found[at]]) < 2e-4


def test_weights_are_held_as_they_are_stored_unless_asked_for():
    stored = {n: to_bfloat16(a) if a.ndim == 2 else a for n, a in BUNDLE.arrays.items()}
    narrow = replace(BUNDLE, arrays=stored)
    for bundle, weights, held in [
        (BUNDLE, None, "float32"),
        (narrow, None, "bfloat16"),
        (BUNDLE, "int8", "int8"),
        (narrow, "float32", "float32"),
    ]:
        mine = replace(bundle, arrays=dict(bundle.arrays))  # the engine takes them
        opened = engine.open_engine(mine, device="cpu", threads=1, weights=weights)
        assert isinstance(opened, CpuEngine)
        assert opened.stored == held


def test_without_kernels_torch_serves_and_holds_float32(monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    engine.missing_kernels.cache_clear()
    try:
        assert isinstance(engine.open_engine(BUNDLE, device="cpu", threads=1), TorchEngine)
        with pytest.raises(UsageError, match="--weights int8") as refused:
            engine.open_engine(BUNDLE, device="cpu", weights="int8")
        assert "NUMBA_DISABLE_JIT" in refused.value.hint
    finally:
        engine.missing_kernels.cache_clear()


def write(**environment: str) -> tuple[bytes, str]:
    """What `tgen generate` writes to stdout and to stderr."""
    options = ["--prompt", "What is", "-t", "0", "-n", "20", "--device", "cpu"]
    command = [sys.executable, "-m", "tgen", "generate", "--model", str(shipped_model()), *options]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, check=True)
    return done.stdout, done.stderr.decode()


def test_a_command_without_kernels_or_a_place_to_keep_them_writes_the_same_text(tmp_path: Path):
    text, said = write()
    without, notice = write(NUMBA_DISABLE_JIT="1")
    assert without == text
    assert "torch computes" in notice
    assert "torch computes" not in said
    (tmp_path / "file").write_bytes(b"")
    held = {}  # compiled anew all the same: so also for vectors half as wide
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and {"avx2", "fma"} <= set(cpuinfo.read_text().split()):
        held = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    homeless, notice = write(XDG_CACHE_HOME=str(tmp_path / "file"), **held)
    assert homeless == text
    assert "compiling for this processor" in notice


def test_a_damaged_kernel_is_made_anew(tmp_path: Path):
    write()  # compiles if nothing is kept
    kept = kernel_cache._path()
    (tmp_path / "tgen" / "kernels").mkdir(parents=True)
    damaged = tmp_path / "tgen" / "kernels" / kept.name
    content = kept.read_bytes()
    damaged.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    text, said = write(XDG_CACHE_HOME=str(tmp_path))
    assert text == write()[0]
    assert "compiling" in said
    assert "compiling" not in write(XDG_CACHE_HOME=str(tmp_path))[1]


def test_kernels_are_kept_under_any_umask_but_only_in_a_folder_of_ours(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "kernels"
    before = os.umask(0o002)
    try:
        assert kernel_cache._is_ours(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(folder)
    assert not kernel_cache._is_ours(tmp_path / "link")
    folder.chmod(0o775)
    assert not kernel_cache._is_ours(folder)
    folder.chmod(0o755)
    assert kernel_cache._is_ours(folder)
    (tmp_path / "file").write_bytes(b"")
    assert not kernel_cache._is_ours(tmp_path / "file" / "kernels")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert not kernel_cache._is_ours(folder)


def test_on_a_processor_torch_is_not_loaded():
    code = (
        "import sys; from tgen import load; model = load(sys.argv[1], device='cpu'); "
        "print(''.join(model.generate('What is', max_new_tokens=3))); "
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(shipped_model())], check=True)


def test_int8_costs_little():
    text = BUNDLE.tokenizer.encode_prompt(b"ROMEO:\nWhat is the matter with you, my lord?\n" * 3)
    narrow, exact = (
        CpuEngine(BUNDLE.config, dict(BUNDLE.arrays), n_threads=1, stored=stored)
        for stored in ("int8", "float32")
    )
    nats = []
    for one in (narrow, exact):
        (logits,) = one.extend([text[:-1]], every_position=True)
        wide = logits.astype(np.float64)
        log_p = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        nats.append(-log_p[np.arange(len(log_p)), text[1:]].mean())
    assert 0 < abs(nats[0] - nats[1]) < 0.02


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot choose a processor")
def test_two_threads_come_to_the_end_on_one_processor_that_others_keep_busy():
    code = """
import os, subprocess, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    from tgen.api import Model
    from tgen.checkpoint import model_dir
    from tgen.checkpoint.model_lookup import shipped_model
    from tgen.engine.cpu.engine import CpuEngine
    bundle = model_dir.load(shipped_model())
    model = Model(bundle, CpuEngine(bundle.config, dict(bundle.arrays), n_threads=2))
    print(end="".join(model.generate("What is", max_new_tokens=20, temperature=0)))
finally:
    for process in busy:
        process.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout == write()[0]
