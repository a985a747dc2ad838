"""`tgen generate` as a command: its messages, and rows that fail late."""

import json
import os
import re
import sys
from typing import Any

import pytest

from support.command import clean_environment, tgen
from tgen.cli.app import run

LATE = "(a{0,1000}){0,1000}"


@pytest.fixture
def generate(trained, capsysbinary):
    """Run `tgen generate` in this process; return its status, stdout and stderr."""

    def run_generate(*arguments):
        status = run(["generate", "-m", str(trained), "--seed", "1", *map(str, arguments)])
        out, err = capsysbinary.readouterr()
        return status, out.decode(errors="replace"), err.decode()

    return run_generate


def test_constraint_that_fails_late_is_an_error_of_its_row(trained):
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "n": 5},
        {"prompt": "a", "regex": LATE, "n": 400, "bias": {"a": 99}, "id": 7},
        {"prompt": "a", "choices": ["yes", "no"]},
        {"prompt": "a", "json_schema": {"$ref": "#"}},
        {"prompt": "a", "choices": [f"choice {i:05}" for i in range(3000)], "n": 60},
    ]
    lines = "\n".join(map(json.dumps, rows)).encode()
    command = ["generate", "-m", trained, "--input", "-", "--seed", 1]
    result = tgen(*command, "--jsonl", "-q", stdin=lines)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 1
    assert ["error" in one for one in records] == [False, True, False, True, False]
    assert records[1]["id"] == 7
    assert "regex: lexer error: too many expressions" in records[1]["error"]["message"]
    assert "json_schema: no text matches" in records[3]["error"]["message"]
    assert records[4]["text"] in rows[4]["choices"]
    plain = tgen(*command, "-q", stdin=lines).stdout.splitlines()
    assert len(plain) == len(rows) + records[0]["text"].count("\n")
    assert plain[-1].decode() == records[4]["text"]


def test_constraint_that_fails_late_fails_a_single_text(generate):
    status, out, err = generate("-p", "a", "--regex", LATE, "-n", 400, "--bias", "a=99", "-q")
    assert status == 1
    assert set(out) == {"a"}
    assert "error: --regex: lexer error" in err
    assert "hint: " in err


def test_choices_with_commas_and_repeated_options(generate):
    options = ["-p", "a", "-q", "-n", 99, "--seed", 1]
    assert generate(*options, "--choices", '["yes, please"]')[1] == "yes, please"
    assert generate(*options, "--choices", '["a,b"]', "--choices", "a,b", "--ban", "b")[1] == "a"
    assert generate(*options, "--choices", "[x")[1] == "[x"
    texts = {
        generate(*options[:-1], seed, "--choices", "x,y", "--choices", "z")[1] for seed in range(12)
    }
    assert texts == {"x", "y", "z"}


def test_ids_as_options_of_a_text_and_of_a_row(generate):
    options = ["-p", "a", "-q", "-n", 9, "-t", 0, "--json"]
    ids = json.loads(generate(*options)[1])["tokens"]
    banned = ["--logit-bias", f"{ids[0]}=-100", "--logit-bias", f"{ids[1]}=-100"]
    assert not {*ids[:2]} & {*json.loads(generate(*options, *banned)[1])["tokens"]}
    stop = ["--stop-token-ids", ids[1], "--min-tokens", 1, "--ignore-eos"]
    assert json.loads(generate(*options, *stop)[1])["tokens"] == ids[:2]
    status, out, err = generate(*options, "--logit-bias", "5")
    assert (status, out) == (2, "")
    assert "--logit-bias: not ID=NUMBER (got '5')" in err
    status, out, err = generate(*options, "--logit-bias", "99999999=1")
    assert (status, out) == (2, "")
    assert "--logit-bias: invalid token id 99999999, expected ids below" in err


def test_schemas_and_grammars_may_be_given_as_text(generate, tmp_path):
    schema = {"type": "array", "items": {"enum": ["x"], "format": "path"}, "minItems": 2}
    text = json.dumps(schema | {"maxItems": 2})
    status, out, err = generate("-p", "a", "--json-schema", text)
    assert (status, json.loads(out)) == (0, ["x", "x"])
    assert 'note: --json-schema: items.format: "path" is not checked' in err
    (tmp_path / "schema").write_text(text)
    assert generate("-p", "a", "--json-schema", tmp_path / "schema")[1] == out
    one_line = ('start: "yz"', "start: /yz/")
    for grammar in ('root ::= "y" b\nb ::= "z"', 'start: "y" B\nB: "z"', *one_line):
        assert generate("-p", "a", "-q", "--grammar", grammar)[:2] == (0, "yz")
    assert (
        "--json-schema: not: the negation"
        in generate("-p", "a", "--json-schema", '{"not": {"pattern": ""}}')[2]
    )
    assert (
        "--grammar: line 1: there is no rule a" in generate("-p", "a", "--grammar", "root ::= a")[2]
    )


@pytest.mark.parametrize("text", ['["a,b",3]', '["a,b"', "[]", '["a", ""]', "[1]"])
def test_choices_that_are_no_list_of_strings_are_refused(generate, text):
    status, out, err = generate("-p", "a", "-q", "--choices", text)
    assert (status, out) == (2, "")
    assert f"--choices: not a JSON list of strings (got {text!r})" in err
    assert "hint: " in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--choices", "king", "--ban", "in"],
            ["--choices: each choice contains a string of --ban"],
        ),
        (["--choices", "a", "--regex", "b"], ["--choices cannot be combined with --regex"]),
        (["--choices", "a", "--min-tokens", 2], ["--min-tokens cannot be combined with --choices"]),
        (["-t", "inf"], ["--temperature: invalid value inf", "a finite number of at least 0"]),
        (["--top-n-sigma", "inf"], ["--top-n-sigma", "a finite number from 0 to 1,000,000"]),
        (["--words", ""], ["--words is empty", "name a text file"]),
        (["--json-schema", "none.json"], ["--json-schema: none.json does not exist", "spelling"]),
        (["--json-schema", "empty"], ["--json-schema empty: the file is empty", "JSON schema"]),
        (["--json-schema", "bad"], ["--json-schema bad: Expecting", "JSON schema"]),
        (["--json-schema", "latin"], ["--json-schema latin: ", "JSON schema"]),
        (["--json-schema", "large"], ["--json-schema large: more than 1,048,576 bytes"]),
        (["--json-schema", "wrong"], ["--json-schema wrong: "]),
        (["--require", "a", "-n", 0], ["--require: the strings have 1 token, but only 0"]),
    ],
)
def test_options_in_conflict_and_bad_files(generate, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bad").write_bytes(b"{")
    (tmp_path / "latin").write_bytes(b'"\xe9"')
    (tmp_path / "large").write_bytes(b" " * (1 << 21))
    (tmp_path / "wrong").write_bytes(b'{"type": "nothing"}')
    status, out, err = generate("-p", "a", *options)
    assert status == 2
    assert out == ""
    for word in words:
        assert word in err


def test_missing_input_file_is_named_with_its_option(generate):
    status, _, err = generate("--input", "none.jsonl")
    assert status == 1
    assert "error: --input: none.jsonl does not exist\nhint: check the spelling" in err


def test_prompt_cache_of_another_prompt_is_warned_about(generate, tmp_path):
    generate("-p", "What is", "-n", 0, "--save-cache", tmp_path / "a.cache")
    _, _, err = generate("-p", "king", "-n", 1, "--load-cache", tmp_path / "a.cache")
    assert f"warning: {tmp_path}/a.cache is not used" in err
    assert "starts differently" in err
    _, _, err = generate("-p", "What was", "-n", 1, "--load-cache", tmp_path / "a.cache")
    assert "warning" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("terminal", [True, False])
def test_message_starts_on_its_own_line(trained, terminal):
    """On a terminal, and if stdout and stderr go to one file."""
    import pty
    import subprocess

    command = [sys.executable, "-m", "tgen", "generate", "-m", str(trained), "-p", "a"]
    command += ["--regex", "[xyz]{9}", "-n", "2", "--seed", "1"]
    reader, writer = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=clean_environment()
    ) as process:
        os.close(writer)
        output = b""
        while block := _read(reader):
            output += block
    os.close(reader)
    assert process.returncode == 1
    lines = output.decode().replace("\r", "").splitlines()
    assert any(line.startswith("error: the text is incomplete") for line in lines), lines
    assert any(len(line) == 2 and set(line) <= set("xyz") for line in lines), lines
    assert lines[-1].startswith("2 tokens")


def _read(fd):
    try:
        return os.read(fd, 4096)
    except OSError:  # a terminal whose other end is closed
        return b""


def test_warning_of_a_long_prompt_groups_the_digits(generate):
    _, _, err = generate("-p", "~|" * 2000, "-n", 1)
    assert re.search(r"warning: the prompt has [1-9],\d{3} tokens, more than the context of", err)
