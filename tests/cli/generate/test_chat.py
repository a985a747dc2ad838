"""`tgen generate --chat`."""

# ruff: noqa: F401, F811  # fixtures are imported

import json
import subprocess
import sys

import pytest

from support.chats import CHATML, MISTRAL, SYSTEM, model, plain_model, user
from support.command import clean_environment, tgen
from tgen.cli.app import run
from tgen.drawing.terminal_text import printable
from tgen.generation.loop import make_source
from tgen.generation.random_numbers import row_seed
from tgen.loaded_model import open_model
from tgen.python_api import load


def test_the_command_answers(model, capsysbinary, tmp_path):
    path = model(CHATML)
    base = ["generate", "-m", str(path), "--seed", "5", "-n", "6", "-q"]
    asked = [SYSTEM, *user("Who?")]
    wanted = load(path).chat(asked, seed=5, max_new_tokens=6).encode()
    assert run([*base, "--chat", "--system", SYSTEM["content"], "-p", "Who?"]) == 0
    out, err = capsysbinary.readouterr()
    assert (out.decode(errors="replace").encode(), err) == (wanted, b"")
    piped = tgen(*base, "--chat", "--system", SYSTEM["content"], stdin=b"Who?\n")
    assert piped.stdout == out  # the line's end was not said
    assert run([*base, "-p", "Who?"]) == 0
    assert capsysbinary.readouterr().out != out
    (tmp_path / "rows.txt").write_text("Who?\nWhat?\n")
    files = ["--input", str(tmp_path / "rows.txt"), "--chat", "--jsonl"]
    assert run([*base, *files]) == 0
    rows = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    chats = open_model(path).chat_format
    assert [row["prompt"] for row in rows] == ["Who?", "What?"]
    assert [row["prompt_tokens"] for row in rows] == [
        len(chats.encode(user(text))) for text in ("Who?", "What?")
    ]


def test_what_does_not_go_with_a_chat(model, plain_model, capsysbinary, tmp_path):
    base = ["generate", "-m", str(model(MISTRAL)), "-p", "x", "-n", "1"]
    for more, word in [
        (["--system", "x"], b"--system needs --chat"),
        (["--chat", "--echo"], b"--chat cannot be combined with --echo"),
        (
            ["--chat", "--save-cache", str(tmp_path / "c")],
            b"--save-cache cannot be combined with --chat",
        ),
    ]:
        assert run([*base, *more]) == 2
        assert word in capsysbinary.readouterr().err
    assert run(["generate", "-m", str(plain_model), "-p", "x", "--chat"]) == 1
    assert (
        b"has no chat template\nhint: choose a model with a chat" in capsysbinary.readouterr().err
    )
    assert run(["generate", "-m", str(model("{% for %}")), "-p", "x", "--chat", "-q"]) == 1
    said = capsysbinary.readouterr().err
    assert said.startswith(b"error: the chat template failed: TemplateSyntaxError")
    assert said.count(b"\n") == 2


def test_without_chat_the_template_is_not_touched(model):
    path = model("{% for %}")
    (path / "tokenizer_config.json").write_text("{")
    (path / "chat_template.jinja").mkdir()
    code = (
        "import sys; from tgen.cli.app import run; "
        f"status = run(['generate', '-m', {str(path)!r}, '-p', 'x', '-n', '1', '-q']); "
        "assert not {'jinja2', 'tgen.chat'} & {*sys.modules}; sys.exit(status)"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, env=clean_environment(), timeout=900)


def test_a_conversation_has_turns(model):
    interactive = pytest.importorskip("test_interactive")
    path = model(CHATML)
    terminal = interactive.Terminal("generate", "-m", path, "-i", "--chat", "--seed", 4, "-n", 7)
    terminal.until(b"> ")
    ours, said = open_model(path), []
    for turn, line in enumerate(("What is", "a crown?")):
        terminal.type(line.encode() + b"\r")
        terminal.until(line.encode() + b"\r\n")
        shown = terminal.until(b"\r\n> ")
        said += user(line)
        sampling = ours.sampling({"seed": row_seed(4, turn), "max_new_tokens": 7})
        (ids,) = [ours.chat_request(said, sampling)]
        answer = b"".join(token.text for token in ours.complete(make_source([ids]), batch_size=1))
        said.append({"role": "assistant", "content": answer.decode("utf-8", "surrogateescape")})
        wanted = printable(answer.decode(errors="replace")).removesuffix("\n")
        assert shown.decode() == wanted.replace("\n", "\r\n")
    terminal.type(b"\x04")
    assert terminal.end()[1] == 0
