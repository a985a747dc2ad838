"""The commands of `--interactive`, in a text and in a chat."""

# ruff: noqa: F401, F811  # fixtures are imported

import json

import pytest

from support.chats import CHATML, model, plain_model
from tgen.cli.app import run
from tgen.cli.generate import interactive
from tgen.corpus import read
from tgen.python_api import load


@pytest.fixture
def interact(monkeypatch, capsysbinary, trained):
    """Type lines into the command; return stdout and stderr after each, the start first."""

    def type_lines(*lines, model=trained, options=("-n", "8", "--seed", "4")):
        answers, left = [], [*lines]

        def read_line(_):
            answers.append(
                tuple(data.decode(errors="replace") for data in capsysbinary.readouterr())
            )
            if not left:
                raise EOFError
            line = left.pop(0)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(interactive, "require_terminal", lambda: None)
        monkeypatch.setattr("builtins.input", read_line)
        assert run(["generate", "-m", str(model), "-i", *options]) == 0
        return answers

    return type_lines


@pytest.fixture(params=["text", "chat"])
def either(request, interact, model):
    """Return `interact` for a text, or for a chat."""
    if request.param == "text":
        return interact

    path = model(CHATML)
    return lambda *lines, options=("-n", "8", "--seed", "4"): interact(
        *lines, model=path, options=(*options, "--chat")
    )


def outputs(answers):
    return [out for out, _ in answers[1:]]


def test_undo_leaves_no_trace(either):
    plain = outputs(either("What is", "the king", "and more"))
    answers = either("What is", "a crown?", "/undo", "the king", "/undo", "the king", "and more")
    out = outputs(answers)
    assert out[1] != out[3]
    assert [out[0], out[3], out[6]] == plain
    assert out[3] == out[5]
    assert out[2] == ""
    assert answers[3][1] == "removed the last turn; 1 turn left\n"


def test_retry_has_the_next_seed_and_shows_it(either):
    hot = ("-n", "8", "-t", "3", "--seed")
    answers = either("What is", "/retry", "/retry", "/undo", "What is", options=(*hot, "4"))
    first, second, third, _, again = answers[1:]
    assert len({first[0], second[0], third[0]}) == 3
    assert again[0] == third[0]
    seed = second[1].removeprefix("seed ").strip()
    assert either("What is", options=(*hot, seed))[1][0] == second[0]


def test_retry_with_a_seed_is_the_command_with_this_seed(interact, trained):
    wanted = load(trained).generate("What is", seed=77, max_new_tokens=8).rstrip("\n")
    answers = interact("What is", "/seed 77", "/seed", "/retry", "/seed", "/seed 77", "/retry")
    assert answers[3][1] == "seed 77 is next\n"
    assert answers[4] == (wanted + "\n", "seed 77\n")
    assert "77" not in answers[5][1]
    assert answers[7] == answers[4]


SETTINGS = {
    "temperature 1.7": {"temperature": 1.7},
    "-t 0": {"temperature": 0.0},
    "top_k 2": {"top_k": 2},
    "--max-new-tokens 3": {"max_new_tokens": 3},
    "stop is": {"stop": ["is"]},
    "ban  e": {"ban": [" e"]},
    "bias king=5": {"bias": {"king": 5.0}},
    "logit-bias 70=9": {"logit_bias": {70: 9.0}},
    "stop-token-ids 5": {"stop_token_ids": [5]},
    "choices yes,no": {"choices": ["yes", "no"]},
    "regex [a-c]{3}": {"regex": "[a-c]{3}"},
    "ignore-eos true": {"ignore_eos": True},
    "no-penalize-prompt true": {"penalize_prompt": False},
    "penalize-prompt false": {"penalize_prompt": False},
    "samplers top_p,temperature": {"samplers": ["top_p", "temperature"]},
    "seed 9": {"seed": 9},
}


@pytest.mark.parametrize("given", SETTINGS)
def test_set_is_the_flag(interact, trained, given):
    options = {"seed": 4, "max_new_tokens": 8} | SETTINGS[given]
    wanted = load(trained).generate("What is", **options).rstrip("\n")
    answers = interact(f"/set {given}", "What is")
    assert answers[1] == ("", "")
    assert answers[2][0] == wanted + "\n"


def test_words_of_a_file_and_of_the_corpus(interact, trained, tmp_path):
    (tmp_path / "few.txt").write_text("king queen")
    for name, words in (
        (tmp_path / "few.txt", b"king queen"),
        ("corpus", (trained.parent / "corpus.txt").read_bytes()),
    ):
        wanted = load(trained).generate("What is", seed=4, words=words, max_new_tokens=8)
        answers = interact(f"/set words {name}", "What is")
        assert answers[2][0] == (wanted if wanted.endswith("\n") else wanted + "\n")


def test_set_shows_what_was_changed(interact):
    answers = interact(
        "/set temperature 0.5", "/set stop a", "/set", "/set stop", "/set stop default", "/set"
    )
    assert answers[3][1] == "max-new-tokens 8\ntemperature 0.5\nstop a\n"
    assert answers[4][1] == "stop a\n"
    assert answers[6][1] == "max-new-tokens 8\ntemperature 0.5\n"
    answers = interact("/set top-k 1", "/set top-k", "/set top-p 1", "/set top-p", "/set grammar")
    assert [answers[i][1] for i in (2, 4, 5)] == ["top-k 1\n", "top-p 1.0\n", "grammar none\n"]
    answers = interact("/set no-penalize-prompt true", "/set no-penalize-prompt", "/set -n")
    assert answers[2][1] == "penalize-prompt false\n"
    assert answers[3][1] == "max-new-tokens 8\n"
    answers = interact("/set bias king=3", "/set bias", "/set logit-bias 5=2", "/set logit-bias")
    assert [answers[i][1] for i in (2, 4)] == ["bias king=3.0\n", "logit-bias 5=2.0\n"]
    (_, (_, err)) = interact("/set", options=["--seed", "1"])
    assert err == "all options have their defaults\n"


ERRORS = {
    "/halp": ["/halp: unknown command", "did you mean /help?"],
    "/": ["/: unknown command", "/help lists the commands; // at the start of a line writes"],
    "/x\x1b[31m": ["/x\\u001b[31m: unknown command", "/help lists"],
    "/undo": ["no turn to remove or repeat", "type a line first"],
    "/retry": ["no turn to remove or repeat", "type a line first"],
    "/why": ["/why: no answer to show", "type a line first"],
    "/undo 2": ["/undo takes no value (got '2')", "type /undo"],
    "/save": ["/save: no file", "name a new file"],
    "/seed x": ["--seed: invalid value 'x'", "set --seed to a whole number"],
    "/seed -1": ["--seed: invalid value -1", "set --seed to a number from 0"],
    "/set temprature 1": ["unknown option 'temprature'", "did you mean temperature?"],
    "/set draft off": ["draft cannot be set here", "set it on the command line"],
    "/set temperature x": ["--temperature: invalid value 'x'", "set --temperature to a number"],
    "/set temperature -1": ["--temperature: invalid value -1", "set --temperature to a number"],
    "/set ignore-eos maybe": ["ignore-eos: invalid value 'maybe'", "set ignore-eos to true"],
    "/set logprobs 3": ["--logprobs needs JSON output", "add --json"],
    "/set words /no/file": ["--words: /no/file does not exist", "name a text file"],
    "/set grammar start: x": ["--grammar: ", "correct the --grammar"],
    "/set bias king": ["--bias: not TEXT=NUMBER", "use, for example"],
}


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_is_two_lines_and_changes_nothing(interact, line):
    message, hint = ERRORS[line]
    answers = interact(line, "What is", "/set")
    error, advice = answers[1][1].splitlines()
    assert error.startswith(f"error: {message}")
    assert advice.startswith(f"hint: {hint}")
    assert answers[1][0] == ""
    assert answers[2] == interact("What is")[1]
    assert answers[3][1] == "max-new-tokens 8\n"


def test_a_second_constraint_is_refused(interact):
    answers = interact("/set regex a+", "/set words corpus", "/set regex default", "/set")
    assert answers[2][1].startswith("error: --words cannot be combined with --regex\nhint: ")
    assert answers[4][1] == "max-new-tokens 8\n"


def test_two_slashes_write_one(interact, trained):
    wanted = load(trained).generate("/undo", seed=4, max_new_tokens=8).rstrip("\n")
    assert interact("//undo")[1][0] == wanted + "\n"


def test_clear_starts_again(either):
    first, _, _, again = outputs(either("What is", "/clear", "/seed 4", "What is"))
    assert again == first


def test_save_writes_what_was_said(either, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = either("What is", "the king", "/save a b.jsonl", "/save a b.jsonl", "/clear")
    content = (tmp_path / "a b.jsonl").read_bytes()
    assert answers[3][1] == f"saved a b.jsonl ({len(content)} bytes)\n"
    message, hint = answers[4][1].splitlines()
    assert message == "error: /save a b.jsonl: the file exists"
    assert hint == "hint: name a new file"
    texts = [out for out, _ in answers[1:3]]
    if content.startswith(b'{"messages"'):
        (line,) = content.splitlines()
        said = json.loads(line)["messages"]
        assert [one["role"] for one in said] == ["user", "assistant"] * 2
        assert [one["content"] for one in said[::2]] == ["What is", "the king"]
        assert [one["content"].rstrip("\n") + "\n" for one in said[1::2]] == texts
        assert read(["a b.jsonl"]).is_chat  # `tgen train` reads it
    else:
        text = content.decode(errors="replace")
        assert text.startswith("What is" + texts[0].rstrip("\n"))
        assert text.rstrip("\n").endswith(texts[1].rstrip("\n"))
        assert "the king" in text


def test_why_shows_the_tokens_of_the_last_answer(either):
    answers = either("What is", "/why", "/retry", "/undo", "/why")
    header, *lines, note = answers[2][0].splitlines()
    rows = [line for line in lines if not line.startswith(" ")]  # without the rest of long ones
    assert header.split() == ["token", "probability", "rank", "alternatives"]
    assert 1 <= len(rows) <= 8
    assert "before the samplers" in note
    for row in rows:
        cells = row.split()
        probability = float(next(cell for cell in cells if cell.endswith("%"))[:-1])
        assert 0 <= probability <= 100
    shown = answers[1][0]
    if shown.isprintable():
        assert "".join(row.split()[0] for row in rows).startswith(shown.replace(" ", "·")[:5])
    assert not {"\x1b", "\x07", "\x0e"} & {*answers[2][0]}
    assert "/why: no answer to show" in answers[5][1]


def test_help_lists_the_commands(interact):
    out = interact("/help")[1][0]
    for name in ("/help", "/undo", "/save FILE", "/seed [N]", "/set [NAME [VALUE]]", "//"):
        assert name in out


def test_control_c_in_a_line_and_an_empty_line(interact):
    answers = interact("What is", KeyboardInterrupt(), "", "/undo")
    assert answers[1][0].strip()
    assert answers[3][0].strip()
    assert answers[4][1] == "removed the last turn; 1 turn left\n"
