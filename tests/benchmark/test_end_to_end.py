"""A command's phases: nothing is left out, and the text is the one that anybody gets."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

import tgen
from support.models import make_model
from tgen.benchmark.end_to_end import measure
from tgen.benchmark.memory import peak_memory_bytes
from tgen.checkpoint import model_dir
from tgen.errors import TgenError, UsageError
from tgen.reports import EndToEndReport, Token, TrialReport
from tgen.tokenizer import TextStream

PROMPT = b"The king \xff said: \xe2\x82"  # no UTF-8, and half a character
PHASES = ["start", "import", "load", "engine", "prefill", "decode", "detokenise", "exit"]


@pytest.fixture
def saved(tokenizer, tmp_path) -> Path:
    """Of a seed whose greedy text varies, and past the context stands inside a character."""
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size, seed=9)
    model_dir.save(tmp_path / "model", model.config, tokenizer, model.to_arrays())
    return tmp_path / "model"


def greedy(path: Path, n: int) -> list[Token]:
    model = tgen.load(path, device="cpu")
    sampling = tgen.SamplingConfig(temperature=0, max_new_tokens=n)
    return list(model.tokens([model.encode(PROMPT)], sampling=sampling, draft="off"))


def inside_a_character(tokens: list[Token]) -> bool:
    stream = TextStream()
    for token in tokens:
        stream.feed(token.text)
    return stream.flush() != b""


def test_phases_add_up_and_the_text_is_the_models(saved):
    tokens = greedy(saved, 80)  # past the context of 48
    n_gen = max(n for n in range(1, 80) if inside_a_character(tokens[:n]))
    began = time.monotonic()
    *rounds, report = measure(saved, PROMPT, n_gen=n_gen, trials=2, device="cpu")
    whole = time.monotonic() - began
    assert rounds == [TrialReport(trial=i, trials=2) for i in range(3)]
    assert isinstance(report, EndToEndReport)
    assert list(report.phases) == list(report.first) == PHASES
    for trial, total in enumerate(report.total.seconds):
        parts = [report.phases[name].seconds[trial] for name in PHASES]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(total, rel=1e-9)
    assert sum(report.total.seconds) + sum(report.first.values()) <= whole
    assert report.n_prompt == len(model_dir.load(saved).tokenizer.encode(PROMPT))
    assert report.n_gen == n_gen
    assert report.tokens_per_second == n_gen / report.total.median
    assert report.text == b"".join(token.text for token in tokens[:n_gen])
    pieces = tgen.load(saved).generate(PROMPT, temperature=0, max_new_tokens=n_gen)
    assert "".join(pieces).replace("\ufffd", "") == report.text.decode(errors="ignore")


def test_a_text_ends_where_the_model_ends_it(saved):
    *_, long = measure(saved, PROMPT, n_gen=20, trials=1, device="cpu", draft="off")
    tokenizer = model_dir.load(saved).tokenizer
    ids = [token.id for token in greedy(saved, 20)]
    end = next(i for i in ids if i != ids[0])
    described = (saved / "generation_config.json").read_text()
    ours = f'"eos_token_id": {tokenizer.end_of_text}'
    assert ours in described
    (saved / "generation_config.json").write_text(
        described.replace(ours, f'"eos_token_id": [{end}]')
    )
    *_, short = measure(saved, PROMPT, n_gen=20, trials=1, device="cpu")
    n = ids.index(end)
    assert (long.n_gen, short.n_gen) == (20, n + 1)
    assert short.text == tokenizer.decode(ids[:n])


def test_torch_is_not_imported_for_a_processor(saved, tmp_path, monkeypatch):
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").write_text("raise ImportError('torch was asked')")
    paths = [str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    arguments = dict(n_gen=3, trials=1, device="cpu")
    *_, report = measure(saved, PROMPT, modules=["tgen.cli.app"], **arguments)
    assert report.n_gen == 3
    with pytest.raises(TgenError, match="torch was asked"):  # the trap is one
        list(measure(saved, PROMPT, modules=["torch"], **arguments))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_is_that_of_the_child(saved):
    *_, report = measure(saved, PROMPT, n_gen=3, trials=1, device="cpu")
    ours = peak_memory_bytes()  # torch is in this process
    assert report.peak_memory_bytes is not None
    assert ours is not None
    assert 8 << 20 < report.peak_memory_bytes < ours - (50 << 20)


def test_an_empty_prompt_begins_where_documents_do(saved):
    *_, report = measure(saved, b"", n_gen=3, trials=1, device="cpu")
    pieces = tgen.load(saved).generate("", temperature=0, max_new_tokens=3)
    assert report.n_prompt == 1
    assert report.text.decode(errors="replace") == "".join(pieces)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        described = (saved / name).read_text()
        described = described.replace("eos_token_id", "nothing").replace("<|endoftext|>", "<|a|>")
        (saved / name).write_text(described)
    with pytest.raises(TgenError, match="the prompt is empty"):
        list(measure(saved, b"", n_gen=3, trials=1, device="cpu"))


def test_what_fails_is_told_in_one_line(saved, tmp_path, monkeypatch):
    arguments = dict(n_gen=3, trials=1, device="cpu")
    missing = str(tmp_path / "nothing")
    with pytest.raises(TgenError) as caught:
        list(measure(Path(missing), PROMPT, **arguments))
    assert caught.value.message == f"model {missing!r} does not exist"
    with pytest.raises(TgenError) as caught:
        list(measure(saved, PROMPT, modules=["tgen.nothing"], **arguments))
    assert caught.value.message == "ModuleNotFoundError: No module named 'tgen.nothing'"
    for wrong in (dict(n_gen=0), dict(trials=0)):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} is 0"):
            list(measure(saved, PROMPT, **arguments | wrong))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(TgenError, match="ended with status 1"):
        list(measure(saved, PROMPT, **arguments))
