"""What is generated is what is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import clean_environment, tgen

ROOT = Path(__file__).parent.parent


def test_the_manual_is_that_of_the_commands(tmp_path):
    command = [sys.executable, "-m", "typer", "tgen.cli.app", "utils", "docs", "--name", "tgen"]
    subprocess.run(
        [*command, "--output", tmp_path / "cli.md"],
        check=True,
        capture_output=True,
        env=clean_environment(),
    )
    assert (tmp_path / "cli.md").read_text() == (ROOT / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_names_of_models(tmp_path, shell):
    for name in ("plays", "poems", "other"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    asked = {"COMP_WORDS": "tgen generate --model p", "COMP_CWORD": "3"}
    asked |= {
        "_TYPER_COMPLETE_ARGS": "tgen generate --model p",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    result = tgen("ignored", cwd=tmp_path, _TGEN_COMPLETE=f"complete_{shell}", **asked)
    assert result.returncode == 0, result.stderr
    assert b"plays" in result.stdout
    assert b"poems" in result.stdout
    assert b"other" not in result.stdout


@pytest.mark.parametrize("terminal", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_not_one_escape_byte_where_there_is_no_terminal(trained, terminal):
    for arguments in (["--help"], ["generate", "--help"], ["inspect", "-m", trained, "-p", "a"]):
        result = tgen(*arguments, **terminal)
        assert b"\x1b" not in result.stdout + result.stderr


def test_output_does_not_depend_on_the_locale(trained):
    wanted = tgen("inspect", "-m", trained, "-p", "é日")
    for locale in (
        {"LC_ALL": "C"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONUTF8": "0", "LC_ALL": "C"},
    ):
        found = tgen("inspect", "-m", trained, "-p", os.fsencode("é日").decode(), **locale)
        assert found.stdout == wanted.stdout
