"""generation_config.json: defaults that flags override, and never a reason not to run."""

import json
import shutil
from pathlib import Path

import pytest

from support.command import tgen
from tgen.api import load
from tgen.checkpoint import model_dir
from tgen.checkpoint.hf.generation_config import FILE, read
from tgen.cli.app import run
from tgen.config import SamplingConfig

MADE = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 12.0,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3,
    "max_new_tokens": 9,
}
OURS = {
    "temperature": 0.6,
    "top_k": 12,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "no_repeat_ngram": 3,
    "max_new_tokens": 9,
}


@pytest.fixture
def model(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "model", ignore=shutil.ignore_patterns("training"))
    return tmp_path / "model"


def says(model: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (model / FILE).write_text(text)
    return model


def test_what_is_read(model):
    assert read(says(model, MADE)).sampling == OURS
    assert read(says(model, MADE | {"do_sample": False})).sampling == OURS | {"temperature": 0}
    assert read(says(model, dict.fromkeys(MADE))).sampling == {}
    usual = SamplingConfig()
    ours = {"do_sample": True, "temperature": usual.temperature, "top_k": usual.top_k}
    assert read(says(model, ours)) == read(model.parent)
    assert read(says(model, {"eos_token_id": [5, 7]})).end_ids == [5, 7]
    assert model_dir.load(model).end_ids == {5, 7}
    assert model_dir.load(says(model, {"eos_token_id": "x"})).end_ids == {0}  # config.json's


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("temperature", -1, "temperature -1 (it must be 0 (greedy) or a positive number)"),
        ("temperature", float("nan"), "temperature NaN (it must be 0"),
        ("temperature", float("inf"), "temperature Infinity (it must be 0"),
        ("temperature", "hot", 'temperature "hot" (it must be a number)'),
        ("top_k", 2.5, "top_k 2.5 (it must be a whole number)"),
        ("top_k", -1, "top_k -1 (it must be 0 (off) or"),
        ("top_p", 0, "top_p 0 (it must be a number above 0"),
        ("top_p", True, "top_p true (it must be a number)"),
        ("no_repeat_ngram_size", [], "no_repeat_ngram_size [] (it must be a number)"),
        ("repetition_penalty", 0, "repetition_penalty 0 (it must be"),
        ("do_sample", "no", 'do_sample "no" (it must be true or false)'),
        ("eos_token_id", [0, -3], "eos_token_id [0, -3] (it must be ids of tokens)"),
    ],
)
def test_a_senseless_value_is_named_and_passed_over(model, key, value, said):
    found = read(says(model, {"min_p": 0.5, key: value}))
    assert found.sampling == {"min_p": 0.5}
    (line,) = found.notes
    assert line.startswith(f"{FILE}: ignored: {said}")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", "[" * 100_000, '{"temperature": 1' + "0" * 5000]
)
def test_a_broken_file_keeps_no_model_from_running(model, content, capsysbinary):
    says(model, content)
    assert run(["generate", "-m", str(model), "-p", "The", "-n", "1"]) == 0
    said = capsysbinary.readouterr().err.decode()
    assert said.count(f"{FILE} is ignored: it is not") == 1
    assert model_dir.load(model).end_ids == {0}


def test_what_tgen_does_not_have_is_said(model):
    given = {"num_beams": 4, "penalty_alpha": 0.6, "bad_words_ids": [[1]], "guidance_scale": None}
    off = {"epsilon_cutoff": 0.0, "min_length": 0, "suppress_tokens": [], "num_beam_groups": 1}
    (line,) = read(says(model, given | off | {"transformers_version": "5"})).notes
    assert line.endswith("not followed: num_beams 4, penalty_alpha 0.6, bad_words_ids [[1]]")


def test_the_command_follows_says_so_and_flags_override(model, capsysbinary):
    says(model, MADE | {"num_beams": 2})
    base = ["generate", "-m", str(model), "-p", "The", "--seed", "3"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OURS.items()]
    assert run(base) == 0
    out, err = capsysbinary.readouterr()
    said = [line for line in err.decode().splitlines() if line.startswith(FILE)]
    assert said == [
        f"{FILE}: temperature 0.6, top-k 12, top-p 0.95, min-p 0.05, repetition-penalty 1.1, "
        "no-repeat-ngram 3, max-new-tokens 9 (flags override)",
        f"{FILE}: not followed: num_beams 2",
    ]
    assert run([*base, "-t", "0.8", "-n", "4"]) == 0
    assert f"{FILE}: top-k 12".encode() in capsysbinary.readouterr().err
    assert run([*base, "-q"]) == 0
    assert capsysbinary.readouterr() == (out, b"")
    (model / FILE).unlink()
    assert run([*base, *flags]) == 0
    assert capsysbinary.readouterr().out == out
    assert run(base) == 0
    assert capsysbinary.readouterr().out != out


def test_greedy_unless_a_flag_says_otherwise(model, capsysbinary):
    says(model, {"do_sample": False, "temperature": 0.9})
    base = ["generate", "-m", str(model), "-p", "The", "-n", "12"]
    texts = []
    for more in (["--seed", "1"], ["--seed", "2"], ["-t", "0"], ["-t", "5", "--seed", "1"]):
        assert run([*base, *more]) == 0
        out, err = capsysbinary.readouterr()
        texts.append(out)
        assert (b"json: greedy (flags override)" in err) == ("-t" not in more)
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_nothing_is_said_of_what_tgen_wrote(trained):
    result = tgen("generate", "-m", trained, "-p", "The", "-n", 1)
    assert FILE not in result.stderr.decode()


def test_python_has_the_same_defaults(model):
    text = "".join(load(says(model, MADE)).generate("The", seed=3))
    lines = load(model).generate_batch(["The"], seed=3)
    warm = "".join(load(model).generate("The", seed=3, temperature=5))
    (model / FILE).unlink()
    assert "".join(load(model).generate("The", seed=3, **OURS)) == text == lines[0] != warm
