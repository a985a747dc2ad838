"""`tgen sweep` from the command line: values, errors, and its results."""

import json
import os
import re

import pytest

from tgen.cli.sweep.command import SweepOptions, parse_values
from tgen.errors import UsageError

TEXT = "What is a text? " * 300


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text(TEXT)
    return tmp_path


def test_values_are_separated_by_commas_or_a_json_list():
    settings = [
        "learning_rate=1e-3, 3e-3",
        "n-layers=2",
        'tokenizer=["a,b.json", "char"]',
        "x=[1, 2.5]",
    ]
    assert parse_values(settings) == {
        "learning_rate": ["1e-3", "3e-3"],
        "n_layers": ["2"],
        "tokenizer": ["a,b.json", "char"],
        "x": ["1", "2.5"],
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["learning_rate"], "not FIELD=VALUES"),
        (["learning_rate=1,,2"], "a value is empty"),
        (["learning_rate="], "a value is empty"),
        (["learning_rate=[1, 2"], "not a JSON list"),
        (["learning_rate=[]"], "a value is empty"),
        (["learning_rate=1", "learning-rate=2"], "is given twice"),
    ],
)
def test_invalid_values_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        parse_values(settings)


def test_options_and_settings_vary():
    settings = ["family=gpt2,llama", "parameters=100k,0.2M", "learning_rate=1e-3"]
    options = SweepOptions(run={"corpus": ["a.txt"]}, settings=settings, seeds=3)
    request = options.request()
    values = [cell for cell, _ in request.cells]
    assert values[1] == {"family": "gpt2", "parameters": "0.2M"}  # what does not differ is no value
    run = request.cells[2][1]
    assert (run.family, run.parameters) == ("llama", 100_000)
    assert run.overrides == {"learning_rate": "1e-3"}
    assert request.seeds == [1337, 1338, 1339]
    assert str(request.out) == "sweeps/a"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "family=gpt2,xyz"], "--family: invalid value 'xyz'"),
        (["--set", "family=gpt2", "--family", "llama"], "--set family cannot be combined"),
        (["--set", "parameters=1k,1e6"], "--parameters: invalid value '1e6'"),
        (["--set", "size=nano,tiny", "--parameters", "100k"], "cannot be combined with --size"),
        (["--set", "seed=1,2"], "use --seeds"),
        (["--set", "family=gpt2,llama", "--halving"], "--halving: no effect on 2 combinations"),
        (["--flop", "1e40"], "--flop: invalid value 1e+40"),
        (["--out", "corpus.txt/x", "--steps", "2"], "--out corpus.txt/x: "),
        (["--set", "learning_rate=1,1.0", "--steps", "2"], "two combinations are the same"),
        (["--set", "learning_rate=1,x", "--steps", "2"], "learning_rate=x: invalid value"),
        (["--flop", "1e9", "--steps", "2"], "--flop cannot be combined with --steps"),
        (["--seeds", "0"], "--seeds: invalid value 0"),
        (["-"], "reads its corpus several times"),
    ],
)
def test_usage_errors_come_before_the_first_run(run_here, corpus, arguments, message):
    shown = run_here("sweep", "corpus.txt", "--out", "out", *arguments, cwd=corpus)
    assert shown.returncode == 2, shown.stderr
    assert message.encode() in shown.stderr
    assert not (corpus / "out").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_sweep_does_not_read_a_pipe(run_here, corpus):
    os.mkfifo(corpus / "pipe")
    shown = run_here("sweep", "pipe", "--out", "out", cwd=corpus)
    assert (shown.returncode, b"reads its corpus several times" in shown.stderr) == (2, True)


def test_dry_run_shows_how_many_how_long_and_how_large(run_here, corpus):
    arguments = [
        "--set",
        "family=gpt2,llama",
        "--parameters",
        "50k",
        "--seeds",
        "3",
        "--minutes",
        "2",
    ]
    shown = run_here("sweep", "corpus.txt", *arguments, "--dry-run", cwd=corpus).stdout.decode()
    assert re.search(r"family +model +time per run\n", shown)
    assert re.search(r"llama +llama, 0.05 M parameters +2 min\n", shown)
    assert "2 combinations × 3 seeds = 6 runs, about 12:00 of training, about 12.0 MB" in shown
    assert not (corpus / "sweeps").exists()


def test_sweep_ends_with_its_results(run_here, corpus):
    arguments = ["--set", "learning_rate=1e-3,1e-2", "--size", "nano", "--steps", "2"]
    command = ["sweep", "corpus.txt", *arguments, "--set", "context_length=16", "--json"]
    shown = run_here(*command, cwd=corpus)
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    done = [one for one in lines if one.get("state") == "done"]
    assert [one["name"] for one in done] == [
        "learning_rate=1e-3_seed=1337",
        "learning_rate=1e-2_seed=1337",
    ]
    assert lines[-1]["schema"] == "tgen.compare/1"
    losses = {one["name"]: one["best"] for one in lines[-1]["runs"]}
    assert losses == {one["name"]: one["bits_per_byte"] for one in done}
    plan = run_here(*command[:-1], "--dry-run", cwd=corpus).stdout.decode()
    assert re.search(r"time per run +runs done\n1e-3 .* 2 steps +1 of 1\n", plan)
    assert b"bits/byte" in shown.stderr
    again = run_here(*command, cwd=corpus)
    assert again.returncode == 0
    assert b"StepReport" not in again.stdout
