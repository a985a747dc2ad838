"""The options of `tgen serve`: wrong ones end it before a model is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.command import clean_environment
from tgen.cli.app import run
from tgen.cli.serve import KEY_VARIABLE, ServeOptions, _model_name


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--port", 70_000], 2, b"--port: invalid value 70000"),
        (["--queue", 0], 2, b"--queue: invalid value 0"),
        (["--max-body", "much"], 2, b"--max-body: not a size"),
        (["--max-body", 500], 2, b"--max-body: the unit is missing"),
        (["--request-timeout", "nan"], 2, b"--request-timeout: invalid value nan"),
        (["--api-key", " "], 2, b"--api-key: the key is empty"),
        (["--model", "nothing"], 1, b"model 'nothing' does not exist"),
        (["--host", "192.0.2.1"], 1, b"cannot listen on 192.0.2.1:8000"),
        (["--host", "a" * 300], 1, b"cannot listen on aaa"),
    ],
)
def test_wrong_options_are_two_lines(
    arguments: list[object], status: int, message: bytes, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["serve", *map(str, arguments)]) == status
    out, err = capsysbinary.readouterr()
    assert out == b""
    assert message in err
    assert [line.split(b":")[0] for line in err.splitlines()] == [b"error", b"hint"]


def test_white_space_around_a_key_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret\n")
    assert ServeOptions().key == "secret"
    assert ServeOptions(api_key=" other ").key == "other"


def test_missing_packages_are_named() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; from tgen.cli.app import run; "
        "sys.exit(run(['serve', '--port', '0']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=clean_environment(), check=False
    )
    assert result.returncode == 1
    assert b"error: tgen serve needs the package starlette" in result.stderr
    assert b"hint: pip install 'tgen-lm[serve]'" in result.stderr


def test_model_is_served_under_its_name_without_directories() -> None:
    for name, path, expected in (
        (None, "models/shakespeare", "shakespeare"),
        ("owner/model:Q8_0", "cache/0123", "model:Q8_0"),
        ("models/mine/", "models/mine", "mine"),
        ("x.gguf", "x.gguf", "x"),
    ):
        assert _model_name(name, Path(path)) == expected
