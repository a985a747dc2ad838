"""`tgen inspect --view sources`: a table, JSON and CSV of the passages in the training text."""

import csv
import io
import json
import re
import subprocess
import sys

import pytest

from support.command import tgen
from support.runs import request
from tgen import runs
from tgen.config.training import TrainConfig
from tgen.runs import saved_state

HOSTILE = "\x1b]52;c;cm0=\x1b\\\x1b[2J\r\x9b\x07\u202e[red]"
TEXT = f"The first line.\nA very rare\tpassage {HOSTILE}of words.\n" + "More words, again.\n" * 99


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose index has the text of a file with a hostile name."""
    folder = tmp_path_factory.mktemp("sources")
    corpus = folder / f"a{HOSTILE.replace('/', '')}.txt"
    corpus.write_text(TEXT, newline="")
    values = {"corpus": [str(corpus)], "train": TrainConfig(steps=2), "index": True}
    list(runs.start(request(folder, **values)))
    return folder / "model"


def is_clean(output):
    return all(c.isprintable() or c == "\n" for c in output.decode())


def test_a_table_has_passages_places_and_context(inspect, model):
    done = inspect("--view", "sources", model=model, prompt="So very rare\tpassage; words, again.")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == ["passage", "occurrences", "file", "line", "context"]
    assert lines[1].startswith("very rare passage  ")
    assert " 2  rst line. A […] \\u001b" in lines[1]
    repeated = [line for line in lines if line.startswith("words, again.")]
    assert len(repeated) == 1
    first = lines.index(repeated[0])
    numbers = [re.findall(r" (\d+)  ", line)[-1] for line in lines[first : first + 3]]
    assert numbers == ["3", "4", "5"]
    assert lines[-1].endswith(": 31 of 35 bytes")
    assert is_clean(done.stdout + done.stderr)


def test_json_and_csv_have_the_same_places(inspect, model, tmp_path):
    prompt = f"rare\tpassage {HOSTILE}of words"
    done = inspect("--view", "sources", "--json", model=model, prompt=prompt)
    record = json.loads(done.stdout)
    assert record["schema"] == "tgen.inspect.sources/1"
    (passage,) = record["passages"]
    assert is_clean(done.stdout + done.stderr)
    assert (passage["start"], passage["end"], passage["occurrences"]) == (
        0,
        len(prompt.encode()),
        1,
    )
    table = inspect("--view", "sources", "--csv", "-", model=model, prompt=prompt).stdout
    header, row = csv.reader(io.StringIO(table.decode()))
    assert is_clean(table.replace(b"\t", b""))
    named = dict(zip(header, row, strict=True))
    (place,) = passage["places"]
    assert (int(named["line"]), named["occurrences"]) == (place["line"], "1")
    assert named["before"] == place["before"] == "The first line.\nA very "
    done = inspect("--view", "sources", "--csv", tmp_path / "a.csv", model=model, prompt=prompt)
    assert (tmp_path / "a.csv").read_bytes() == table
    assert b"wrote" in done.stderr


def test_other_views_can_be_shown_beside(inspect, model):
    views = ("--view", "tokens", "--view", "sources")
    record = json.loads(inspect(*views, "--json", model=model, prompt="More words").stdout)
    assert record["sources"]["passages"][0]["text"] == "More words"
    done = inspect(*views, model=model, prompt="More words")
    assert b"1 passage in the training text" in done.stdout


def test_a_text_without_a_known_word_and_an_empty_one(inspect, model):
    done = inspect("--view", "sources", model=model, prompt="xyzzy")
    assert done.stdout.startswith(b"no word of this text is in the training text (")
    done = inspect("--view", "sources", model=model, prompt="")
    assert (done.returncode, b"error: the prompt is empty" in done.stderr) == (2, True)


def test_top_limits_the_passages(inspect, model):
    prompt = "More words; first line; very rare"
    done = inspect("--view", "sources", "--top", "1", model=model, prompt=prompt)
    assert b"the longest 1 of 5 passages" in done.stdout
    done = inspect("--view", "sources", "--head", "1", model=model, prompt=prompt)
    assert b"--head: no effect on this view" in done.stderr


def test_a_damaged_index_is_one_warning_or_one_error(trained, inspect, tmp_path):
    path = saved_state.index_path(trained)
    path.write_bytes(b"x" * 1000)
    try:
        done = inspect("--view", "sources")
    finally:
        path.unlink()
    assert done.returncode == 0
    assert done.stderr.decode().count("text.index is damaged and is ignored\n") == 1
    corpus = tmp_path / "c.txt"
    corpus.write_text("some text\n" * 99)
    list(runs.start(request(tmp_path, corpus=[str(corpus)], train=TrainConfig(steps=1))))
    corpus.unlink()
    done = inspect("--view", "sources", model=tmp_path / "model")
    assert (done.returncode, done.stdout) == (1, b"")
    error, hint = done.stderr.decode().splitlines()
    assert "no index" in error
    assert hint.startswith("hint: ")


def test_the_search_does_not_import_torch(model):
    code = "import sys; from tgen.cli.app import run; run(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "inspect", "-m", model, "--view=sources", "-p=words"]
    subprocess.run(command, check=True, capture_output=True)


def test_training_stores_the_index(tmp_path):
    (tmp_path / "c.txt").write_text("some text\n" * 99)
    options = ["--steps", 1, "--set=d_model=16", "--set=context_length=16", "--index"]
    done = tgen("train", tmp_path / "c.txt", *options, "--out", tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert saved_state.index_path(tmp_path / "m").exists()
    done = tgen("train", "--resume", "--index", "--out", tmp_path / "m")
    assert b"--index" in done.stderr
    assert done.returncode == 2
