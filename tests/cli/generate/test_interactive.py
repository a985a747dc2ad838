"""At a terminal: line after line, Ctrl-C stops a text and not the program."""

import os
import select
import sys

import pytest

from support.command import clean_environment, tgen
from tgen.cli.generate.interactive import read_line
from tgen.config import EngineOptions, SamplingConfig
from tgen.generation.loop import extract_prompt_cache
from tgen.loaded_model import Decoding, open_model
from tgen.python_api import load

pty = pytest.importorskip("pty")


class Terminal:
    """The command with a terminal of its own."""

    def __init__(self, *arguments):
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-m", "tgen", *map(str, arguments)]
            os.execve(sys.executable, command, clean_environment(TERM="dumb"))
        self.seen = b""

    def until(self, text, *, press=b""):
        """Everything up to and with `text`; `press` is typed, and again if nothing happens: Python
        does not notice a Ctrl-C in the instant before it waits for keys."""
        self.type(press)
        while text not in self.seen:
            if press and not select.select([self._fd], [], [], 3)[0]:
                self.type(press)
                continue
            block = os.read(self._fd, 1024)
            assert block, self.seen
            self.seen += block
        found, _, self.seen = self.seen.partition(text)
        return found

    def type(self, data):
        os.write(self._fd, data)

    def end(self):
        """The rest, and the exit status."""
        rest = self.seen
        try:
            while block := os.read(self._fd, 1024):
                rest += block
        except OSError:  # how a terminal says that nobody is there any more
            pass
        os.close(self._fd)
        return rest, os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_conversation(trained):
    terminal = Terminal("generate", "-m", trained, "-i", "--seed", 4, "-n", 12)
    terminal.until(b"> ")
    terminal.type(b"What is\r")
    terminal.until(b"What is\r\n")
    first = terminal.until(b"\r\n> ")
    model = load(trained)
    wanted = model.generate("What is", seed=4, max_new_tokens=12)
    assert first.decode() == wanted.rstrip("\n").replace("\n", "\r\n")
    terminal.until(b"> ", press=b"\x03")  # at a prompt: forgets the line
    terminal.type(b"\x04")
    rest, status = terminal.end()
    assert status == 0
    assert b"\x1b" not in rest


def test_ctrl_c_stops_the_text(trained):
    terminal = Terminal("generate", "-m", trained, "-i", "-n", 10_000_000)
    for _ in range(2):
        terminal.until(b"> ")
        terminal.type(b"The\r")
        terminal.until(b"The\r\n")
        terminal.until(b"e")  # it is writing
        terminal.type(b"\x03")
    terminal.until(b"> ")
    terminal.type(b"\x04")
    assert terminal.end()[1] == 0


def test_what_a_turn_computed_is_kept(trained):
    model = open_model(trained, EngineOptions(threads=1))
    ids = model.encode("What")
    sampling = SamplingConfig(max_new_tokens=8, seed=1)
    text = [*ids, *(token.id for token in model.tokens([ids], sampling=sampling))]
    cache = extract_prompt_cache(model.engine, text)
    assert cache is not None
    assert len(cache.tokens) == len(text) - 1
    more = [*text, *model.encode(" is")]
    decoding = Decoding(prompt_cache=cache)
    again = [token.id for token in model.tokens([more], sampling=sampling, decoding=decoding)]
    assert again == [token.id for token in model.tokens([more], sampling=sampling)]
    long = SamplingConfig(max_new_tokens=60, seed=1)
    text = [*ids, *(token.id for token in model.tokens([ids], sampling=long))]
    assert extract_prompt_cache(model.engine, text) is None  # it has slid


def test_control_characters_are_shown_on_a_terminal_and_exact_in_a_pipe(trained):
    given = ["generate", "-m", trained, "-p", "a\x1b[31mb\x07", "-n", 0, "--echo", "-q"]
    assert tgen(*given).stdout == b"a\x1b[31mb\x07"
    rest, status = Terminal(*given).end()
    assert status == 0
    assert rest == b"a\\u001b[31mb\\u0007\r\n"


def test_nobody_can_type_into_a_pipe(trained):
    result = tgen("generate", "-m", trained, "--interactive")
    assert result.returncode == 2
    assert b"--interactive needs a terminal" in result.stderr


@pytest.mark.parametrize(
    ("term", "columns", "imported"),
    [("xterm", 80, True), ("xterm", 0, True), ("xterm", 3, False), ("dumb", 80, False)],
)
def test_readline_is_only_used_where_it_cannot_crash(monkeypatch, term, columns, imported):
    pytest.importorskip("readline")
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((columns, 24)))
    monkeypatch.setattr("builtins.input", lambda _: "a")
    monkeypatch.delitem(sys.modules, "readline")
    assert read_line() == b"a"
    assert ("readline" in sys.modules) == imported
