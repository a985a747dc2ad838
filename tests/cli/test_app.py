"""The command as people run it: pipes, signals, and the shipped model."""

import base64
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import clean_environment, start, tgen
from support.models import TEXT
from tgen.checkpoint import model_lookup
from tgen.cli import streams
from tgen.cli.app import run
from tgen.tokenizer import Tokenizer

SHIPPED = Path(__file__).parents[2] / "models" / "shakespeare"


# Modules that take long to import, and that a command must not need before its first output.
NOT_IN_HELP = {"torch", "numpy", "tokenizers", "llvmlite", "pydantic", "markdown_it", "pygments"}
NOT_IN_TEXT = {
    "torch",
    "numpy.random",
    "tgen.engine.cpu.compiler",
    "pydantic",
    "rich.console",
    "jinja2",
    "tgen.checkpoint.gguf.reader",
}


@pytest.mark.parametrize(
    ("arguments", "excluded"),
    [
        (["--help"], NOT_IN_HELP | {"tgen.cli.options"}),
        (["--version"], NOT_IN_HELP | {"tgen.cli.options", "rich.console"}),
        ([], NOT_IN_HELP),
        (["train", "--help"], NOT_IN_HELP - {"numpy"}),
        (["generate", "-h"], NOT_IN_HELP | {"tgen.cli.train.command"}),
        (
            ["generate", "-m", SHIPPED, "-p", "a", "-n", "1", "--threads", "1"],
            NOT_IN_TEXT | {"tgen.config.training"},
        ),
        (["generate", "--top-k", "many"], NOT_IN_TEXT | NOT_IN_HELP),
        (["tokenize", "-m", SHIPPED, "-p", "a", "--ids"], NOT_IN_TEXT | {"llvmlite"}),
        (
            ["score", "-m", SHIPPED, __file__, "--json", "--threads", "1"],
            NOT_IN_TEXT - {"rich.console"},
        ),
    ],
    ids=lambda value: "" if isinstance(value, set) else " ".join(map(str, value[:2])),
)
def test_a_command_imports_only_what_it_needs(arguments, excluded):
    code = (
        "import sys; from tgen.cli.app import run; status = run(sys.argv[1:]); "
        f"print(*({excluded!r} & sys.modules.keys()), file=sys.stderr); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, env=clean_environment(), check=False)
    assert result.returncode == (2 if "many" in arguments else 0), result.stderr.decode()
    assert result.stdout or "many" in arguments
    assert result.stderr.decode().splitlines()[-1] == ""


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
    # The model is almost certain of its text at usual temperatures.
    command = ("generate", "-m", trained, "-n", 30, "-p", "The", "-t", 20, "--min-p", 0)
    first = tgen(*command)
    seed = first.stderr.decode().split("seed ")[1].split()[0]
    assert tgen(*command, "--seed", seed).stdout == first.stdout
    assert tgen(*command).stdout != first.stdout


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
        assert process.wait(timeout=900) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_lost_output_is_never_success(trained):
    for arguments in (
        ["generate", "-m", trained, "-p", "a", "-n", 5],
        ["inspect", "-m", trained, "-p", "a"],
        ["--help"],
        ["--version"],
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
        assert b"error: stdout: No space left on device" in result.stderr
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
    assert [r["kind"] for r in reports if r["kind"] != "PhaseReport"] == [
        "PlanReport",
        "StepReport",
        "StepReport",
        "EvalReport",
        "SampleReport",
        "MemorizationReport",
        "DoneReport",
    ]
    assert result.stderr == b""
    out = tmp_path / "models" / "corpus"  # the default place
    tokenizer = Tokenizer((out / "tokenizer.json").read_text())
    assert len(tokenizer.encode("日".encode())) == 1
    assert b"models/corpus" in tgen("generate", "-p", "T", "-n", 1, cwd=tmp_path).stderr


def test_the_shipped_model_answers_where_nothing_was_trained(tmp_path):
    assert sum(p.stat().st_size for p in SHIPPED.iterdir()) < 10_000_000
    assert {p.name for p in SHIPPED.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "ngrams.safetensors",
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


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, "check its permissions"),
        (errno.EFBIG, "choose another file system"),
        (errno.ENAMETOOLONG, "choose a shorter name"),
        (errno.ENOSPC, "free disk space"),
    ],
)
def test_errors_of_the_disk_have_a_hint(number, hint, monkeypatch, capsys):
    def find_model(_name):
        raise OSError(number, os.strerror(number), "m/config.json")

    monkeypatch.setattr(model_lookup, "find_model", find_model)
    monkeypatch.setattr(streams, "discard_stdout", lambda: None)
    assert run(["generate", "-m", "m", "-p", "x"]) == 1
    message = capsys.readouterr().err
    assert f"error: m/config.json: {os.strerror(number)}\nhint: {hint}" in message


def test_error_without_a_number_keeps_its_text(monkeypatch, capsys):
    def find_model(_name):
        raise OSError("5 requested and 0 written")

    monkeypatch.setattr(model_lookup, "find_model", find_model)
    monkeypatch.setattr(streams, "discard_stdout", lambda: None)
    assert run(["generate", "-m", "m", "-p", "x"]) == 1
    assert "error: 5 requested and 0 written" in capsys.readouterr().err
