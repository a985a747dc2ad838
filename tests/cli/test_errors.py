"""Errors at the command line: one line that says what is wrong, one that says what to do."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.command import clean_environment, tgen
from support.models import TEXT, make_model
from tgen.checkpoint import model_dir
from tgen.cli.app import run


def complains(result: Any, status: int, *words: str) -> None:
    """An error of at most three lines, the right status, no traceback, nothing on stdout."""
    message = result.stderr.decode()
    errors = message[message.rfind("error: ") :] if "error: " in message else message
    assert result.returncode == status, message
    assert result.stdout == b""
    assert "Traceback" not in message
    assert len(errors.strip().splitlines()) == 2, message  # what is wrong, and what to do
    for word in words:
        assert word in errors, message


def test_closed_streams_are_said_to_be(trained):
    inspect: list[object] = ["inspect", "-m", trained, "-p", "a"]
    cases: list[tuple[list[object], int, bytes]] = [
        (["train", "-"], 0, b"stdin is closed"),
        (inspect, 1, b"stdout is closed"),
        ([*inspect, "--csv", "-"], 1, b"stdout is closed"),
        ([*inspect, "--png", "-"], 1, b"stdout is closed"),
        (["bench", "-m", trained], 1, b"stdout is closed"),
    ]
    for arguments, closed, word in cases:
        result = tgen(*arguments, closed=closed)
        assert result.returncode in (1, 2), result.stderr.decode()
        assert word in result.stderr
    for arguments, shell, word in [  # a new Python
        (["generate", "-m", trained, "-n", 2], "<&-", b"no prompt"),
        (["generate", "-m", trained, "-p", "a", "-n", 9], ">&-", b"stdout is closed"),
    ]:
        command = " ".join([sys.executable, "-m", "tgen", *map(str, arguments), shell])
        result = subprocess.run(
            ["sh", "-c", command], stderr=subprocess.PIPE, env=clean_environment(), check=False
        )
        assert result.returncode in (1, 2), result.stderr.decode()
        assert word in result.stderr


def test_bad_corpora(run_here, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "one.txt").write_bytes(b"x")
    complains(run_here("train", tmp_path / "empty.txt"), 1, "empty", "hint")
    complains(run_here("train", tmp_path / "none.txt"), 1, "does not exist")
    complains(run_here("train", str(tmp_path / "*.md")), 1, "no file matches")
    complains(run_here("train", ""), 1, "the name of a file is empty (got '')")
    complains(tgen("train", "-", stdin=b""), 1, "empty")
    complains(run_here("train"), 2, "no corpus")
    complains(
        run_here("train", tmp_path / "one.txt", "--out", tmp_path / "empty.txt"), 2, "is a file"
    )
    complains(run_here("train", "--resume", "--out", tmp_path / "nowhere"), 1, "no run")
    assert run_here("train", tmp_path / "one.txt", "--steps", 1, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "-p", "x", "--temperature", "nan"], ["temperature"]),
        (["generate", "-p", "x", "--temperature", "-1"], ["temperature"]),
        (["generate", "-p", "x", "-t", "warm"], ["temperature"]),
        (["generate", "-p", "x", "-n", "-5"], ["max-new-tokens"]),
        (["generate", "-p", "x", "--top-k", "-1"], ["--top-k"]),
        (["generate", "-p", "x", "--top-p", "0"], ["--top-p"]),
        (["generate", "-p", "x", "--seed", "-1"], ["seed"]),
        (["generate", "-p", "x", "--device", "tpu"], ["device"]),
        (["generate", "-p", "x", "--warm"], ["--warm"]),
        (["inspect", "-p", "x", "--layer", "99"], ["layer"]),
        (["inspect", "-p", "x", "--top", "0"], ["top"]),
        (["bench", "--trials", "0"], ["trials"]),
        (["bench", "--kv-cache", "--length", "100000"], ["100000"]),
        (["train", "CORPUS", "--minutes", "-1"], ["minutes"]),
        (["train", "CORPUS", "--minutes", "nan"], ["minutes"]),
        (["train", "CORPUS", "--steps", "0"], ["steps"]),
        (["train", "CORPUS", "--vocab-size", "12"], ["--vocab-size"]),
        (["train", "CORPUS", "--val-fraction", "1"], ["--val-fraction"]),
        (["train", "CORPUS", "--set", "n_layers=0"], ["n_layers"]),
        (["train", "CORPUS", "--set", "n_layers"], ["n_layers"]),
        (["train", "CORPUS", "--set", "colour=red"], ["colour"]),
        (["train", "CORPUS", "--size", "huge"], ["size"]),
        (["train", "CORPUS", "--threads", "0"], ["threads"]),
        (["train", "CORPUS", "--resume", "--size", "nano"], ["--size"]),
        (["paint"], ["paint"]),
    ],
)
def test_bad_options_exit_2_and_name_the_option(run_here, arguments, words, trained, tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    arguments = [str(tmp_path / "corpus.txt") if a == "CORPUS" else a for a in arguments]
    if arguments[0] in ("generate", "inspect", "bench"):
        arguments += ["-m", str(trained)]
    if arguments[0] == "train":
        arguments += ["--out", str(tmp_path / "out")]
    complains(run_here(*arguments), 2, *words)
    assert not (tmp_path / "out" / "config.json").exists()


def test_bad_models(run_here, tmp_path):
    (tmp_path / "empty").mkdir()
    complains(run_here("generate", "-p", "x", "-m", tmp_path / "none"), 1, "does not exist")
    complains(run_here("generate", "-p", "x", "-m", tmp_path / "empty"), 1, "no config.json")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"")
    complains(run_here("inspect", "-p", "x", "-m", tmp_path / "empty"), 1, "config.json too")


def test_no_prompt_at_a_terminal_is_a_hint(monkeypatch, capsys):
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert run(["generate"]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_a_bug_exits_70_and_leaves_its_traceback_in_a_file(monkeypatch, capsys):
    def broken(*_, **__):
        raise AssertionError("oops")

    monkeypatch.setattr("tgen.cli.generate.command.read_prompt", broken)
    assert run(["generate"]) == 70
    message = capsys.readouterr().err
    assert "internal error: AssertionError: oops" in message
    log = Path(message.strip().split()[-1])
    assert "Traceback" in log.read_text()
    log.unlink()


@pytest.mark.parametrize("flag", ["--html", "--csv", "--svg", "--png", "--vega", "--save"])
def test_files_of_the_model_are_not_overwritten(flag, tokenizer, tmp_path, capsys):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    before = {path: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    name = "config.json" if flag in ("--html", "--save") else "model.safetensors"
    command = ["bench"] if flag == "--save" else ["inspect", "-p", "a"]
    arguments = ["-m", str(tmp_path / "m"), flag, str(tmp_path / "m" / name)]
    assert run([*command, *arguments]) == 2
    assert "is a file of a model" in capsys.readouterr().err
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_removed_working_directory_is_named(tmp_path):
    command = (
        f"cd {tmp_path}/gone && rmdir ../gone && exec {sys.executable} -m tgen train {__file__}"
    )
    (tmp_path / "gone").mkdir()
    result = subprocess.run(
        ["sh", "-c", f"{command} --dry-run"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=clean_environment(),
        check=False,
    )
    complains(result, 1, "working directory no longer exists", "change to another directory")
