"""The command as people run it: pipes, bad input, signals, exit statuses."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import TEXT, clean_environment, tgen
from tgen.cli.app import run
from tgen.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent.parent / "models" / "shakespeare"


def start(*arguments: object, **streams: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tgen", *map(str, arguments)], env=clean_environment(), **streams
    )


def complains(result: subprocess.CompletedProcess[bytes], status: int, *words: str) -> None:
    """An error of at most three lines, the right status, no traceback, nothing on stdout."""
    message = result.stderr.decode()
    errors = message[message.rfind("error: ") :] if "error: " in message else message
    assert result.returncode == status, message
    assert result.stdout == b""
    assert "Traceback" not in message
    assert len(errors.strip().splitlines()) == 2, message  # what is wrong, and what to do
    for word in words:
        assert word in errors, message


def test_help_is_quick_to_show_and_never_loads_torch():
    for arguments in (["--help"], ["train", "--help"], ["generate", "-h"], ["--version"], []):
        code = (
            f"import sys; from tgen.cli.app import run; status = run({arguments!r}); "
            "assert not {'torch', 'tokenizers'} & sys.modules.keys(); sys.exit(status)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert result.returncode == 0, result.stderr.decode()
        assert result.stdout


def test_stdout_is_the_continuation_and_not_one_byte_more(trained):
    options = ["-m", trained, "-n", 40, "--seed", 7]
    plain = tgen("generate", *options, "-p", "What is")
    assert plain.returncode == 0
    assert b"seed 7" in plain.stderr
    record = json.loads(tgen("generate", *options, "-p", "What is", "--json").stdout)
    text = base64.b64decode(record["bytes"]) if "bytes" in record else record["text"].encode()
    assert plain.stdout == text
    assert record["seed"] == 7
    assert len(record["tokens"]) == 40
    echoed = tgen("generate", *options, "-p", "What is", "--echo", "-q")
    assert echoed.stdout == b"What is" + plain.stdout
    assert echoed.stderr == b""
    piped = tgen("generate", *options, stdin=b"What is")
    dashed = tgen("generate", *options, "-p", "-", stdin=b"What is")
    uncached = tgen("generate", *options, "-p", "What is", "--no-kv-cache")
    assert plain.stdout == piped.stdout == dashed.stdout == uncached.stdout


def test_any_bytes_reach_the_tokenizer_and_come_out(trained):
    prompt = "é🦋\n".encode() + b"\xff\xfe"
    piped = tgen("generate", "-m", trained, "-n", 5, "--seed", 1, "--echo", "-q", stdin=prompt)
    assert piped.stdout.startswith(prompt)
    argument = tgen(
        "generate", "-m", trained, "-n", 5, "--seed", 1, "--echo", "-q", "-p", os.fsdecode(prompt)
    )
    assert argument.stdout == piped.stdout
    for locale in (
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    ):
        other = tgen(
            "generate", "-m", trained, "-n", 5, "--seed", 1, "--echo", "-q", stdin=prompt, **locale
        )
        assert other.stdout == piped.stdout


def test_a_loop_around_prompt_keeps_its_own_stdin(trained):
    command = f'{sys.executable} -m tgen generate -q -n 1 -m {trained} -p "$line"'
    loop = f"while read -r line; do {command}; echo; done"
    result = subprocess.run(
        ["sh", "-c", loop],
        input=b"one\ntwo\n",
        capture_output=True,
        env=clean_environment(),
        check=True,
    )
    assert result.stdout.count(b"\n") >= 2


def test_the_printed_seed_reproduces_the_text(trained):
    first = tgen("generate", "-m", trained, "-n", 30, "-p", "The")
    seed = first.stderr.decode().split("seed ")[1].split()[0]
    assert (
        tgen("generate", "-m", trained, "-n", 30, "-p", "The", "--seed", seed).stdout
        == first.stdout
    )
    assert tgen("generate", "-m", trained, "-n", 30, "-p", "The").stdout != first.stdout


def test_a_reader_that_leaves_ends_it_silently(trained):
    with start(
        "generate",
        "-q",
        "-m",
        trained,
        "-n",
        1_000_000,
        "-p",
        "The",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_lost_output_is_never_success(trained):
    for arguments in (
        ["generate", "-m", trained, "-p", "a", "-n", 5],
        ["inspect", "-m", trained, "-p", "a"],
        ["--help"],
    ):
        with Path("/dev/full").open("wb") as full:
            result = subprocess.run(
                [sys.executable, "-m", "tgen", *map(str, arguments)],
                stdout=full,
                stderr=subprocess.PIPE,
                env=clean_environment(),
                check=False,
            )
        assert result.returncode == 1
        assert b"No space left on device" in result.stderr
        assert b"Traceback" not in result.stderr


def test_stdin_can_be_trained_on_and_the_result_generated_from(tmp_path):
    result = tgen(
        "train",
        "-",
        "--steps",
        4,
        "--out",
        tmp_path / "m",
        "--set",
        "d_model=16",
        "--set",
        "n_heads=2",
        stdin=TEXT,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert b"validation" in result.stderr
    assert result.stdout == b""
    assert b"\x1b" not in result.stderr
    said = tgen("generate", "-m", tmp_path / "m", "-n", 3, "-q", stdin=b"")
    assert said.returncode == 0


def test_a_char_model_of_json_reports(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    result = tgen(
        "train",
        tmp_path / "corpus.txt",
        "--tokenizer",
        "char",
        "--steps",
        2,
        "--size",
        "tiny",
        "--family",
        "classic",
        "--json",
        "-q",
        cwd=tmp_path,
    )
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [r["kind"] for r in reports] == [
        "PlanReport",
        "StepReport",
        "StepReport",
        "EvalReport",
        "SampleReport",
        "DoneReport",
    ]
    assert result.stderr == b""
    out = tmp_path / "models" / "corpus"  # the default place
    tokenizer = Tokenizer((out / "tokenizer.json").read_text())
    assert len(tokenizer.encode("日".encode())) == 1
    assert b"models/corpus" in tgen("generate", "-p", "T", "-n", 1, cwd=tmp_path).stderr


def test_ctrl_c_saves_and_the_printed_command_goes_on(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    arguments = [
        "train",
        tmp_path / "corpus.txt",
        "--steps",
        60,
        "--set",
        "d_model=16",
        "--set",
        "n_heads=2",
        "--set",
        "eval_every=20",
    ]
    assert tgen(*arguments, "--out", tmp_path / "whole").returncode == 0
    with start(*arguments, "--out", tmp_path / "parts", stderr=subprocess.PIPE) as process:
        log = tmp_path / "parts" / "training" / "log.jsonl"
        while process.poll() is None and not log.exists():
            time.sleep(0.01)  # a poll for the first report, not a guess at a time
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=60)
    assert process.returncode == 130, message.decode()
    assert b"Traceback" not in message
    command = message.decode().split("go on with: tgen ")[1].strip().split()
    assert tgen(*command).returncode == 0
    whole, parts = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_a_run_outlives_its_terminal_and_its_reader(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    small = ["--steps", 40, "--set", "d_model=16", "--set", "n_heads=2", "--set", "eval_every=10"]
    for name, stream in (("a", "stderr"), ("b", "stdout")):
        arguments = ["train", tmp_path / "corpus.txt", "--out", tmp_path / name, *small]
        arguments += ["--json"] if stream == "stdout" else []
        pipes = {"stderr": subprocess.DEVNULL} | {stream: subprocess.PIPE}
        with start(*arguments, **pipes) as process:
            pipe = getattr(process, stream)
            pipe.read(1)
            pipe.close()
            assert process.wait(timeout=100) == 0
        assert (tmp_path / name / "model.safetensors").exists()
        assert (tmp_path / name / "training" / "state-00000040").exists()


def test_closed_streams_are_said_to_be(trained):
    for arguments, closed, word in [
        (["train", "-"], "<&-", b"stdin is closed"),
        (["generate", "-m", trained, "-n", 2], "<&-", b"no prompt"),
        (["inspect", "-m", trained, "-p", "a"], ">&-", b"stdout is closed"),
        (["generate", "-m", trained, "-p", "a", "-n", 9], ">&-", b"stdout is closed"),
    ]:
        command = " ".join([sys.executable, "-m", "tgen", *map(str, arguments), closed])
        result = subprocess.run(
            ["sh", "-c", command], stderr=subprocess.PIPE, env=clean_environment(), check=False
        )
        assert result.returncode in (1, 2), result.stderr.decode()
        assert word in result.stderr


def test_bad_corpora(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "one.txt").write_bytes(b"x")
    complains(tgen("train", tmp_path / "empty.txt"), 1, "empty", "hint")
    complains(tgen("train", tmp_path / "none.txt"), 1, "does not exist")
    complains(tgen("train", str(tmp_path / "*.md")), 1, "no file matches")
    complains(tgen("train", "-", stdin=b""), 1, "empty")
    complains(tgen("train"), 2, "no corpus")
    complains(tgen("train", tmp_path / "one.txt", "--out", tmp_path / "empty.txt"), 2, "is a file")
    complains(tgen("train", "--resume", "--out", tmp_path / "nowhere"), 1, "no run")
    assert tgen("train", tmp_path / "one.txt", "--steps", 1, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "-p", "x", "--temperature", "nan"], ["temperature"]),
        (["generate", "-p", "x", "--temperature", "-1"], ["temperature"]),
        (["generate", "-p", "x", "-t", "warm"], ["temperature"]),
        (["generate", "-p", "x", "-n", "-5"], ["max-new-tokens"]),
        (["generate", "-p", "x", "--top-k", "-1"], ["top_k"]),
        (["generate", "-p", "x", "--top-p", "0"], ["top_p"]),
        (["generate", "-p", "x", "--seed", "-1"], ["seed"]),
        (["generate", "-p", "x", "--device", "tpu"], ["device"]),
        (["generate", "-p", "x", "--warm"], ["--warm"]),
        (["inspect", "-p", "x", "--layer", "99"], ["layer"]),
        (["inspect", "-p", "x", "--top", "0"], ["top"]),
        (["bench", "--trials", "0"], ["trials"]),
        (["bench", "--length", "100000"], ["100000"]),
        (["train", "CORPUS", "--minutes", "-1"], ["minutes"]),
        (["train", "CORPUS", "--minutes", "nan"], ["minutes"]),
        (["train", "CORPUS", "--steps", "0"], ["steps"]),
        (["train", "CORPUS", "--vocab-size", "12"], ["vocab_size"]),
        (["train", "CORPUS", "--val-fraction", "1"], ["val_fraction"]),
        (["train", "CORPUS", "--set", "n_layers=0"], ["n_layers"]),
        (["train", "CORPUS", "--set", "n_layers"], ["n_layers"]),
        (["train", "CORPUS", "--set", "colour=red"], ["colour"]),
        (["train", "CORPUS", "--size", "huge"], ["size"]),
        (["train", "CORPUS", "--threads", "0"], ["threads"]),
        (["train", "CORPUS", "--resume", "--steps", "5"], ["--steps"]),
        (["paint"], ["paint"]),
    ],
)
def test_bad_options_exit_2_and_name_the_option(arguments, words, trained, tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    arguments = [str(tmp_path / "corpus.txt") if a == "CORPUS" else a for a in arguments]
    if arguments[0] in ("generate", "inspect", "bench"):
        arguments += ["-m", str(trained)]
    if arguments[0] == "train":
        arguments += ["--out", str(tmp_path / "out")]
    complains(tgen(*arguments), 2, *words)
    assert not (tmp_path / "out" / "config.json").exists()


def test_bad_models(tmp_path):
    (tmp_path / "empty").mkdir()
    complains(tgen("generate", "-p", "x", "-m", tmp_path / "none"), 1, "does not exist")
    complains(tgen("generate", "-p", "x", "-m", tmp_path / "empty"), 1, "no config.json")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"")
    complains(tgen("inspect", "-p", "x", "-m", tmp_path / "empty"), 1, "pickle")


def test_no_prompt_at_a_terminal_is_a_hint(monkeypatch, capsys):
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert run(["generate"]) == 2
    assert "there is no prompt" in capsys.readouterr().err


def test_a_bug_exits_70_and_leaves_its_traceback_in_a_file(monkeypatch, capsys):
    def broken(*_):
        raise AssertionError("oops")

    monkeypatch.setattr("tgen.cli.generate.read_prompt", broken)
    assert run(["generate"]) == 70
    message = capsys.readouterr().err
    assert "internal error: AssertionError: oops" in message
    log = Path(message.strip().split()[-1])
    assert "Traceback" in log.read_text()
    log.unlink()


def test_the_shipped_model_answers_where_nothing_was_trained(tmp_path):
    assert sum(p.stat().st_size for p in SHIPPED.iterdir()) < 10_000_000
    assert {p.name for p in SHIPPED.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((SHIPPED / "config.json").read_bytes())
    assert config["max_position_embeddings"] >= 256
    result = tgen("generate", "--prompt", "What is", "-n", 100, "--seed", 1, cwd=tmp_path)
    assert result.returncode == 0, result.stderr.decode()
    assert b"shakespeare" in result.stderr
    words = {word.strip(".,;:!?'").lower() for word in result.stdout.decode().split()}
    assert (
        len(words & {"the", "and", "to", "of", "i", "a", "my", "is", "in", "that", "not", "you"})
        >= 3
    )
