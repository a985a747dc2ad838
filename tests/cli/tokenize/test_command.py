"""`tgen tokenize`: every form shows the same tokens, and ids become the same bytes again."""

import io
import json
from contextlib import contextmanager

import pytest

from support.adapters import save_adapter
from support.command import tgen
from support.models import TEXT, make_model
from support.tokenizer_files import LEGACY, mixed, sentencepiece
from tgen.checkpoint import model_dir
from tgen.cli import console, streams
from tgen.cli.app import run
from tgen.tokenizer import Tokenizer

ODD = "é🦋\n\tHello  <|endoftext|> naïve".encode() + b"\xff\xfe\x00 \x1b[2J \xc3"


@pytest.fixture
def tokenize(trained, capsysbinary):
    """Run `tgen tokenize` in this process; return its stdout."""

    def run_tokenize(*arguments, status=0, model=trained):
        assert run(["tokenize", "-m", str(model), *map(str, arguments)]) == status
        out, err = capsysbinary.readouterr()
        return out if status == 0 else err.decode()

    return run_tokenize


def test_ids_become_the_same_bytes(trained, tokenize, tmp_path, monkeypatch):
    text = ODD + mixed(3000).encode() + ODD
    (tmp_path / "text").write_bytes(text)
    ids = tokenize(tmp_path / "text", "--ids", "--as", "bytes")
    tokenizer = model_dir.load_tokenizer(trained)
    assert list(map(int, ids.split())) == tokenizer.encode(text)
    (tmp_path / "ids").write_bytes(ids)
    assert tokenize(tmp_path / "ids", "--decode") == text
    monkeypatch.setattr("tgen.cli.tokenize._PIECE", 100)
    assert tokenize(tmp_path / "text", "--ids", "--as", "bytes") == ids
    as_list = json.dumps(tokenizer.encode(text))
    assert tokenize("--prompt", as_list, "--decode") == text


def test_pipe_gives_the_bytes_back(trained):
    ids = tgen("tokenize", "-m", trained, "--ids", "-q", "--as", "bytes", stdin=ODD)
    assert ids.stderr == b""
    back = tgen("tokenize", "-m", trained, "--decode", stdin=ids.stdout)
    assert back.stdout == ODD
    closed = tgen("tokenize", "-m", trained, "--ids", stdin=b"")
    assert closed.stdout == b"\n"


def test_options_without_effect_are_errors(tokenize, tmp_path):
    (tmp_path / "a.csv").write_bytes(b"x,y\nwords,more\n")
    error = tokenize(tmp_path / "a.csv", "--columns", "x", status=2)
    assert "--columns: has no effect" in error
    assert tokenize(tmp_path / "a.csv", "--columns", "x", "--as", "rows")
    assert "--columns: has no effect" in tokenize("--prompt", "1", "--columns", "x", status=2)
    error = tokenize("--prompt", "1", "--decode", "--encoding", "cp1252", status=2)
    assert "--decode cannot be combined with --encoding" in error


class _Endless:
    """A stdin that repeats a text, and fails after `limit` bytes."""

    def __init__(self, limit):
        self.buffer, self.left = self, limit

    def isatty(self):
        return False

    def read(self, n=-1):
        assert 0 <= n <= self.left, "read too far"
        self.left -= n
        return (b"some text\n" * (n // 10 + 1))[:n]


def test_stdin_is_read_as_a_stream(tokenize, tmp_path, monkeypatch):
    text = ODD + mixed(3000).encode() + ODD
    (tmp_path / "text").write_bytes(text)
    monkeypatch.setattr("tgen.cli.tokenize._PIECE", 100)
    for form in ("--ids", "--json", "--count"):
        expected = tokenize(tmp_path / "text", form, "--as", "bytes")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        shown = str(tmp_path / "text").encode()
        assert tokenize(form, "--as", "bytes").split() == expected.replace(shown, b"-").split()

    def stop(*_, **__):
        raise streams.StdoutClosedError

    monkeypatch.setattr("sys.stdin", _Endless(200))
    monkeypatch.setattr(console, "write", stop)
    monkeypatch.setattr(streams, "discard_stdout", lambda: None)  # it needs a file descriptor
    tokenize("--ids")


def test_progress_of_reading_ends_before_each_text(tokenize, tmp_path, monkeypatch):
    events: list[object] = []

    @contextmanager
    def bar(label, **_):
        yield lambda _: events.append(label)
        events.append("end")

    monkeypatch.setattr(console, "late_progress", bar)
    monkeypatch.setattr(console, "write", events.append)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes("é".encode("utf-16"))
    tokenize(tmp_path, "--ids")
    ids = events[2]
    assert isinstance(ids, bytes)
    assert events == [*["reading", "end", ids, b"\n"] * 2, "end"]


def test_tokenizer_of_an_adapter_is_that_of_its_base(tokenize, trained, tmp_path):
    adapter = save_adapter(tmp_path / "kb", trained)
    assert tokenize("-p", "What is", "--ids", model=adapter) == tokenize("-p", "What is", "--ids")


def test_tokenizer_with_a_space_before_each_text(tokenize, tmp_path):
    tokenizer = Tokenizer(json.dumps(sentencepiece(normalizer=LEGACY)))
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    path = tmp_path / "model"
    model_dir.save(path, model.config, tokenizer, model.to_arrays())
    for text in (b"The king", b" The  king \n", TEXT[:300]):
        (tmp_path / "text").write_bytes(text)
        (tmp_path / "ids").write_bytes(tokenize(tmp_path / "text", "--ids", model=path))
        assert tokenize(tmp_path / "ids", "--decode", model=path) == text


def test_forms_agree(tokenize, tmp_path):
    (tmp_path / "text").write_bytes(ODD)
    (tmp_path / "more").write_bytes(TEXT)
    ids = list(map(int, tokenize(tmp_path / "text", "--ids").split()))
    record = json.loads(tokenize(tmp_path / "text", "--json"))
    assert record["schema"] == "tgen.tokenize/1"
    assert [token["id"] for token in record["tokens"]] == ids
    assert (record["n_tokens"], record["n_bytes"]) == (len(ids), len(ODD))
    _, header, *lines = tokenize(tmp_path / "text").decode().splitlines()
    assert header.split() == ["token", "id", "byte", "text"]
    assert [int(line.split()[1]) for line in lines] == ids
    assert [int(line.split()[0]) for line in lines] == list(range(len(ids)))
    assert lines[-1].endswith("‹C3›")
    _, first, _, total = tokenize(tmp_path / "text", tmp_path / "more", "--count").splitlines()
    assert first.split()[:2] == [str(len(ids)).encode(), str(len(ODD)).encode()]
    assert total.split()[1].replace(b",", b"") == str(len(ODD) + len(TEXT)).encode()
    counts = json.loads(tokenize(tmp_path / "text", "--count", "--json"))
    assert counts == {name: value for name, value in record.items() if name != "tokens"}


def test_wrong_ids_and_options_are_errors(tokenize):
    assert "not a token id (got 'a')" in tokenize("--decode", "-p", "1 a", status=2)
    assert "no token 300" in tokenize("--decode", "-p", "300", status=2)
    assert "cannot be combined" in tokenize("--decode", "--ids", "-p", "1", status=2)
    assert "cannot be combined" in tokenize("file", "-p", "1", status=2)
    assert "does not exist" in tokenize("missing.txt", status=1)
