"""Every option with every odd value: it does what it says, or is refused by name."""

import sys
from dataclasses import fields
from typing import get_type_hints

import pytest
import typer

from tgen.cli.app import app, run
from tgen.config import SamplingConfig, SamplingOptions

VALUES = (None, "some", "nan", "inf", "-1", "1e30", "", "twice")
COMMANDS = typer.main.get_command(app).commands
# What an option needs beside it to mean something.
WITH = {
    "--logprobs": ["--json"],
    "--explain": ["--json"],
    "--input": ["--jsonl"],
    "--samples": ["--jsonl"],
    "--length": ["--kv-cache"],
    "--fail-if-slower": ["--compare", "then.json"],
}
TABLE = [
    (command, option, value)
    for command in ("generate", "inspect", "bench")
    for parameter in COMMANDS[command].params
    for option in parameter.opts[:1]
    for value in VALUES
    if option not in ("--prompt", "--help") or value is not None
]


def test_the_table_is_whole():
    assert len(TABLE) >= 500
    known = {field.name for field in fields(SamplingConfig)}
    assert known <= {parameter.name for parameter in COMMANDS["generate"].params}
    assert get_type_hints(SamplingOptions) == get_type_hints(SamplingConfig)


@pytest.mark.parametrize("command", ["generate", "inspect", "bench"])
def test_every_option_with_every_odd_value(command, trained, capsysbinary, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    base = [command, "-m", str(trained)] + {
        "generate": ["-p", "The", "-n", "2", "-q", "--threads", "1"],
        "inspect": ["-p", "The", "-q"],
        "bench": ["--trials", "1", "-q", "--no-limits"],
    }[command]
    answers = set()
    for _, option, value in [row for row in TABLE if row[0] == command]:
        given = {None: [option], "twice": [option, "1", option, "2"]}.get(value, [option, value])
        flag = next(p for p in COMMANDS[command].params if option in p.opts).is_flag
        if flag:  # takes no value: alone, with one all the same, twice
            given = {None: [option], "twice": [option, option]}.get(value, [f"{option}={value}"])
        arguments = [*base, *WITH.get(option, []), *given]
        status = run(arguments)
        said = capsysbinary.readouterr().err.decode()
        answers.add(status)
        case = f"{arguments} -> {status}: {said}"
        assert "Traceback" not in said, case
        assert status in (0, 1, 2), case
        if status == 2:
            assert len(said.strip().splitlines()) <= 3, case
            assert option in said or option.strip("-").replace("-", "_") in said, case
        if status == 1:  # a file, a model or a text that cannot be had
            assert said.startswith("error: "), case
        if value in ("nan", "inf", "1e30") and option in ("--temperature", "--top-p", "--top-k"):
            assert status == 2 or (option, value) == ("--temperature", "1e30"), case
    assert answers >= {0, 2}
