"""The phases of a one-shot command add up, and its text is the model's."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

import tgen
from support.models import make_model
from tgen.benchmark.end_to_end import measure_end_to_end
from tgen.checkpoint import model_dir
from tgen.config import EngineOptions
from tgen.errors import TgenError
from tgen.loaded_model import Decoding, open_model
from tgen.machine.memory import peak_memory_bytes
from tgen.reports.benchmark import EndToEndReport, TrialReport
from tgen.reports.generation import Token
from tgen.tokenizer import TextStream

PROMPT = b"The king \xff said: \xe2\x82"  # invalid UTF-8, and an incomplete character
PHASES = ["start", "import", "load", "prefill", "decode", "exit"]


@pytest.fixture
def saved(tokenizer, tmp_path) -> Path:
    """The seed's greedy text varies, and is inside a character after one context."""
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size, seed=9)
    model_dir.save(tmp_path / "model", model.config, tokenizer, model.to_arrays())
    return tmp_path / "model"


def measure(path: Path, prompt: bytes = PROMPT, *options: str, n_gen: int = 3, trials: int = 1):
    given = ["--model", str(path), "--device", "cpu", *options]
    return measure_end_to_end(given, prompt, n_gen=n_gen, trials=trials)


def greedy(path: Path, n: int) -> list[Token]:
    model = open_model(path, EngineOptions(device="cpu"))
    sampling = tgen.SamplingConfig(temperature=0, max_new_tokens=n)
    without_drafts = Decoding(draft="off")
    return list(model.tokens([model.encode(PROMPT)], sampling=sampling, decoding=without_drafts))


def inside_a_character(tokens: list[Token]) -> bool:
    stream = TextStream()
    for token in tokens:
        stream.feed(token.text)
    return stream.flush() != b""


def test_phases_add_up_and_the_text_is_the_models_greedy_text(saved):
    tokens = greedy(saved, 80)  # past the context of 48
    n_gen = max(n for n in range(1, 80) if inside_a_character(tokens[:n]))
    began = time.monotonic()
    *rounds, report = measure(saved, n_gen=n_gen, trials=2)
    whole = time.monotonic() - began
    assert rounds == [TrialReport(trial=i, trials=2) for i in range(3)]
    assert isinstance(report, EndToEndReport)
    assert list(report.phases) == list(report.warmup) == PHASES
    for trial, total in enumerate(report.total.seconds):
        parts = [report.phases[name].seconds[trial] for name in PHASES]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(total, rel=1e-9)
    assert sum(report.total.seconds) + sum(report.warmup.values()) <= whole
    assert report.n_prompt == len(model_dir.load(saved).tokenizer.encode(PROMPT))
    assert report.n_gen == n_gen
    assert report.tokens_per_second == n_gen / report.total.median
    assert report.text == b"".join(token.text for token in tokens[:n_gen])
    text = tgen.load(saved).generate(PROMPT, temperature=0, max_new_tokens=n_gen)
    assert text.replace("\ufffd", "") == report.text.decode(errors="ignore")


def test_the_options_of_bench_reach_the_measured_command(saved, run_here, monkeypatch):
    options = ["--end-to-end", "-r", "1", "--json", "--threads", "1", "-p", "5", "-n", "4"]
    done = run_here("bench", "-m", saved, *options)
    record = json.loads(done.stdout)
    assert record["schema"] == "tgen.bench.end_to_end/3"
    assert list(record["phases"]) == PHASES
    assert record["n_gen"] == 4
    monkeypatch.setenv("TGEN_KERNELS", "0")
    refused = run_here("bench", "-m", saved, *options, "--dtype", "int8")
    assert (refused.returncode, b"--dtype int8 needs the comp" in refused.stderr) == (1, True)


def test_generation_stops_at_end_tokens(saved):
    *_, long = measure(saved, PROMPT, "--draft", "off", n_gen=20)
    tokenizer = model_dir.load(saved).tokenizer
    ids = [token.id for token in greedy(saved, 20)]
    end = next(i for i in ids if i != ids[0])
    described = (saved / "generation_config.json").read_text()
    ours = f'"eos_token_id": {tokenizer.end_of_text}'
    assert ours in described
    (saved / "generation_config.json").write_text(
        described.replace(ours, f'"eos_token_id": [{end}]')
    )
    *_, short = measure(saved, n_gen=20)
    n = ids.index(end)
    assert (long.n_gen, short.n_gen) == (20, n + 1)
    assert short.text == tokenizer.decode(ids[:n])


def test_torch_is_not_imported_on_the_cpu(saved, tmp_path, monkeypatch):
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").write_text(
        "raise ImportError('torch was imported')"
    )
    paths = [str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    *_, report = measure(saved)
    assert report.n_gen == 3
    monkeypatch.setenv("TGEN_KERNELS", "0")
    with pytest.raises(TgenError, match="torch was imported"):  # the trap works
        list(measure(saved))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory_is_that_of_the_child(saved):
    *_, report = measure(saved)
    ours = peak_memory_bytes()  # torch is in this process
    assert report.peak_memory_bytes is not None
    assert ours is not None
    assert 8 << 20 < report.peak_memory_bytes < ours - (50 << 20)


def test_empty_prompt_starts_with_the_start_token(saved):
    *_, report = measure(saved, b"")
    text = tgen.load(saved).generate("", temperature=0, max_new_tokens=3)
    assert report.n_prompt == 1
    assert report.text.decode(errors="replace") == text
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        described = (saved / name).read_text()
        described = described.replace("eos_token_id", "missing").replace("<|endoftext|>", "<|a|>")
        (saved / name).write_text(described)
    with pytest.raises(TgenError, match="the prompt is empty"):
        list(measure(saved, b""))


def test_errors_of_the_child_are_one_line(saved, tmp_path, monkeypatch):
    missing = str(tmp_path / "missing")
    with pytest.raises(TgenError) as caught:
        list(measure(Path(missing)))
    assert caught.value.message.startswith(f"model {missing!r} does not exist: not a path")
    with pytest.raises(TgenError) as caught:
        list(measure(saved, PROMPT, "--dtype", "int3"))
    assert caught.value.message == "--dtype: invalid value 'int3'"
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(TgenError, match="exited with 1"):
        list(measure(saved))
