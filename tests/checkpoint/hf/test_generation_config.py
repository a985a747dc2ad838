"""generation_config.json: defaults that flags override; a bad file is never an error."""

import json
import shutil
from pathlib import Path

import pytest

from support.command import tgen
from tgen.checkpoint import model_dir
from tgen.checkpoint.hf.generation_config import FILE_NAME, read
from tgen.cli.app import run
from tgen.config import SamplingConfig
from tgen.python_api import load

THEIRS = {
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


def write_config(model: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (model / FILE_NAME).write_text(text)
    return model


def test_supported_values_are_read(model):
    assert read(write_config(model, THEIRS)).sampling == OURS
    assert read(write_config(model, THEIRS | {"do_sample": False})).sampling == OURS | {
        "temperature": 0
    }
    assert read(write_config(model, dict.fromkeys(THEIRS))).sampling == {}
    usual = SamplingConfig()
    ours = {"do_sample": True, "temperature": usual.temperature, "top_k": usual.top_k}
    assert read(write_config(model, ours)) == read(model.parent)
    assert read(write_config(model, {"eos_token_id": [5, 7]})).end_ids == [5, 7]
    assert model_dir.load(model).end_ids == {5, 7}
    assert model_dir.load(write_config(model, {"eos_token_id": "x"})).end_ids == {
        0
    }  # from config.json


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        ("temperature", -1, "temperature -1 (expected a number of at least 0"),
        ("temperature", float("nan"), "temperature NaN (expected a number of at least 0"),
        ("temperature", float("inf"), "temperature Infinity (expected a finite number of"),
        ("temperature", "hot", 'temperature "hot" (expected a number)'),
        ("top_k", 2.5, "top_k 2.5 (expected a whole number)"),
        ("top_k", -1, "top_k -1 (expected a number of at least 0"),
        ("top_p", 0, "top_p 0 (expected a number above 0"),
        ("top_p", True, "top_p true (expected a number)"),
        ("no_repeat_ngram_size", [], "no_repeat_ngram_size [] (expected a number)"),
        ("repetition_penalty", 0, "repetition_penalty 0 (expected a number from 0.001 to"),
        ("do_sample", "no", 'do_sample "no" (expected true or false)'),
        ("eos_token_id", [0, -3], "eos_token_id [0, -3] (expected token ids)"),
    ],
)
def test_invalid_value_is_reported_and_ignored(model, key, value, note):
    defaults = read(write_config(model, {"min_p": 0.5, key: value}))
    assert defaults.sampling == {"min_p": 0.5}
    (line,) = defaults.notes
    assert line.startswith(f"{FILE_NAME}: ignored: {note}")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", "[" * 100_000, '{"temperature": 1' + "0" * 5000]
)
def test_broken_file_is_reported_and_ignored(model, content, capsysbinary):
    write_config(model, content)
    assert run(["generate", "-m", str(model), "-p", "The", "-n", "1"]) == 0
    err = capsysbinary.readouterr().err.decode()
    assert err.count(f"{FILE_NAME} is ignored: {model / FILE_NAME} is not ") == 1
    assert model_dir.load(model).end_ids == {0}


def test_unsupported_values_are_reported(model):
    unsupported = {
        "num_beams": 4,
        "penalty_alpha": 0.6,
        "bad_words_ids": [[1]],
        "guidance_scale": None,
    }
    disabled = {"epsilon_cutoff": 0.0, "min_length": 0, "suppress_tokens": [], "num_beam_groups": 1}
    (line,) = read(
        write_config(model, unsupported | disabled | {"transformers_version": "5"})
    ).notes
    assert line.endswith("not supported: num_beams 4, penalty_alpha 0.6, bad_words_ids [[1]]")


def test_command_prints_the_defaults_and_flags_override_them(model, capsysbinary):
    write_config(model, THEIRS | {"num_beams": 2})
    base = ["generate", "-m", str(model), "-p", "The", "--seed", "3"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OURS.items()]
    assert run(base) == 0
    out, err = capsysbinary.readouterr()
    lines = [line for line in err.decode().splitlines() if line.startswith(FILE_NAME)]
    assert lines == [
        f"{FILE_NAME}: temperature 0.6, top-k 12, top-p 0.95, min-p 0.05, repetition-penalty 1.1, "
        "no-repeat-ngram 3, max-new-tokens 9 (flags override)",
        f"{FILE_NAME}: not supported: num_beams 2",
    ]
    assert run([*base, "-t", "0.8", "-n", "4"]) == 0
    assert f"{FILE_NAME}: top-k 12".encode() in capsysbinary.readouterr().err
    assert run([*base, "-q"]) == 0
    assert capsysbinary.readouterr() == (out, b"")
    (model / FILE_NAME).unlink()
    assert run([*base, *flags]) == 0
    assert capsysbinary.readouterr().out == out
    assert run(base) == 0
    assert capsysbinary.readouterr().out != out


def test_do_sample_false_is_greedy_unless_a_flag_overrides_it(model, capsysbinary):
    write_config(model, {"do_sample": False, "temperature": 0.9})
    base = ["generate", "-m", str(model), "-p", "The", "-n", "12"]
    texts = []
    for more in (["--seed", "1"], ["--seed", "2"], ["-t", "0"], ["-t", "5", "--seed", "1"]):
        assert run([*base, *more]) == 0
        out, err = capsysbinary.readouterr()
        texts.append(out)
        assert (b"json: greedy (flags override)" in err) == ("-t" not in more)
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_files_of_tgen_are_not_reported(trained):
    result = tgen("generate", "-m", trained, "-p", "The", "-n", 1)
    assert FILE_NAME not in result.stderr.decode()


def test_python_api_has_the_same_defaults(model):
    text = load(write_config(model, THEIRS)).generate("The", seed=3)
    lines = load(model).generate_batch(["The"], seed=3)
    warm = load(model).generate("The", seed=3, temperature=100, min_p=0, top_p=1)
    (model / FILE_NAME).unlink()
    assert load(model).generate("The", seed=3, **OURS) == text == lines[0] != warm
