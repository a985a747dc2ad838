"""`--words`: a file, the training text, and the field of a row."""

import json
import shutil

import pytest

from tgen.python_api import load

WORDS = "king queen crown"


@pytest.fixture
def generate(trained, run_here):
    def generate(*more, model=trained):
        return run_here("generate", "-m", model, "-n", 12, "--seed", 3, "-q", *more)

    return generate


def test_words_of_a_file_of_a_row_and_of_python_are_the_same(generate, trained, tmp_path):
    (tmp_path / "words.txt").write_text(WORDS, encoding="utf-16")
    row = {"prompt": "The ", "words": WORDS}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    wanted = load(trained).generate("The ", words=WORDS, max_new_tokens=12, seed=3)
    assert wanted.split()
    file = generate("-p", "The ", "--words", tmp_path / "words.txt")
    assert (file.returncode, file.stderr) == (0, b"")
    assert file.stdout.decode(errors="replace") == wanted
    rows = generate("--input", tmp_path / "rows.jsonl")
    assert rows.stdout.decode(errors="replace") == wanted + "\n"


def test_words_of_the_corpus_need_no_text_file(generate, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "model")
    text = (trained.parent / "corpus.txt").read_bytes()
    wanted = load(trained).generate("The ", words=text, max_new_tokens=12, seed=3).encode()
    given = generate("-p", "The ", "--words", "corpus", model=tmp_path / "model")
    assert given.stdout == wanted
    shutil.rmtree(tmp_path / "model" / "training")
    given = generate("-p", "The ", "--words", "corpus", model=tmp_path / "model")
    assert given.returncode == 2
    message, hint = given.stderr.decode().splitlines()
    assert message == f"error: --words: {tmp_path / 'model'} has no training text beside it"
    assert hint == "hint: name a text file instead of corpus"


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("", [], "--words {}: the file is empty"),
        ("-- ...", [], "--words {}: the tokenizer can spell no word of the text"),
        ("a", ["--regex", "a"], "--words cannot be combined with --regex"),
        (None, [], "--words: {} does not exist"),
    ],
)
def test_a_file_without_words_is_an_error(generate, tmp_path, content, more, message):
    path = tmp_path / "words.txt"
    if content is not None:
        path.write_text(content)
    given = generate("-p", "The ", "--words", path, *more)
    error, hint = given.stderr.decode().splitlines()
    assert given.returncode == 2
    assert error == "error: " + message.format(path)
    assert hint.startswith("hint: ")
