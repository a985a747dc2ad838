"""A corpus larger than the memory: what is read in parts is what is there at once."""

import hashlib
import io
import json
import os
import sys
import tracemalloc
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tgen import corpus
from tgen.corpus import Corpus, documents, reader, sources, tokenize
from tgen.errors import CorpusError
from tgen.tokenizer import train_char

CHAR = train_char(["abc é日".encode()])
WORDS = [
    b"<|endoftext|>",
    b"<|end",
    b"oftext|>",
    b"\n",
    b"\r\n",
    b" ",
    b"\0",
    b"\xff",
    b"word",
    b"a",
]
TEXTS = st.lists(st.sampled_from([*WORDS, "é".encode(), "\u3000".encode()]), max_size=60)
LINES = st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n", "\r"])
ROWS = st.lists(st.tuples(st.text(max_size=9), st.none() | st.text(max_size=9), LINES), max_size=12)
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def small(monkeypatch):
    """Parts of a few bytes, where they are of megabytes."""
    monkeypatch.setattr(reader, "_BLOCK", 16)
    monkeypatch.setattr(documents, "_READ_WHOLE", 8)
    monkeypatch.setattr(sources, "_STDIN_IN_MEMORY", 10)
    monkeypatch.setattr(sources, "_BLOCK", 7)
    monkeypatch.setattr(tokenize, "_PIECE", 12)
    monkeypatch.setattr(tokenize, "_NEAR", 5)
    monkeypatch.setattr(tokenize, "IN_MEMORY", 20)
    # `corpus.subsample` is the function
    monkeypatch.setattr(sys.modules["tgen.corpus.subsample"], "_PIECE", 9)
    monkeypatch.setattr(sys.modules["tgen.corpus.subsample"], "_LINE", 3)


def whole(found):
    return [tuple(part[:] for part in document) for document in found]


def fingerprint(found):
    digest = hashlib.sha256()
    for document in found:
        for part in document:
            digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(b"\xff" * 8)
    return digest.hexdigest()


@pytest.mark.usefixtures("small")
@given(TEXTS)
@SETTINGS
def test_texts_are_found_as_if_the_file_were_in_memory(tmp_path, parts):
    data = b"".join(parts)
    (tmp_path / "corpus.txt").write_bytes(data)
    wanted = [(text,) for text in data.split(b"<|endoftext|>") if text.strip()]
    if not wanted:
        with pytest.raises(CorpusError):
            corpus.read([str(tmp_path / "corpus.txt")])
        return
    found = corpus.read([str(tmp_path / "corpus.txt")])
    assert whole(found.documents) == wanted
    assert whole(found.documents[1:]) == wanted[1:]
    assert corpus.sizes(found.documents).tolist() == [len(text) for (text,) in wanted]
    assert found.sha256 == fingerprint(wanted)
    assert found.n_bytes == sum(len(text) for (text,) in wanted)


def written(path, rows):
    """The rows as JSON, and as documents."""
    lines, wanted = [], []
    for first, second, end in rows:
        row = {"text": first} if second is None else {"prompt": first, "completion": second}
        lines.append(json.dumps(row, ensure_ascii=len(first) % 2 == 0) + end)
        parts = (first,) if second is None else (first, second)
        wanted.append(tuple(part.encode("utf-8", "surrogatepass") for part in parts))
    path.write_bytes("".join(lines).encode("utf-8", "surrogatepass"))
    return wanted


@pytest.mark.usefixtures("small")
@given(ROWS, TEXTS, st.floats(0, 0.99), st.integers(1, 60))
@SETTINGS
def test_what_lies_on_the_disk_is_split_and_thinned_as_what_is_in_memory(
    tmp_path, rows, text, fraction, most
):
    (tmp_path / "a.txt").write_bytes(b"".join(text))
    wanted = written(tmp_path / "b.jsonl", rows)
    (tmp_path / "c.txt").write_bytes(b"the end\nof it all\n" * 3)
    found = corpus.read([str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.txt")])
    inside = whole(found.documents)
    n_texts = len(inside) - len(wanted) - 1
    assert inside[n_texts:-1] == wanted
    assert found.sha256 == fingerprint(inside)
    numbers = frozenset(range(n_texts, n_texts + len(wanted)))
    assert [i in found.rows for i in range(len(inside))] == [
        i in numbers for i in range(len(inside))
    ]
    here = corpus.train_val_split(Corpus(inside, numbers, []), fraction)
    there = corpus.train_val_split(found, fraction)
    assert (whole(there.train), whole(there.held_out)) == (whole(here.train), whole(here.held_out))
    assert there[2:] == here[2:]
    for side in (0, 1):
        assert whole(corpus.subsample(there[side], most)) == whole(
            corpus.subsample(here[side], most)
        )
    halves = [corpus.tokenize(side.train, CHAR, open_end=side.cut) for side in (here, there)]
    assert halves[0].tokens[:].tolist() == halves[1].tokens[:].tolist()


@pytest.mark.usefixtures("small")
def test_long_input_from_a_pipe_goes_through_a_file(monkeypatch):
    rows = b' \n{"text": "ab"}\n{"prompt": "cd", "completion": "e"}\n'
    for data, wanted in [(b"some text, longer", [(b"some text, longer",)]), (rows, None)]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        found = corpus.read(["-"]).documents
        assert whole(found) == (wanted or [(b"ab",), (b"cd", b"e")])


@given(
    st.lists(
        st.sampled_from(["word", " ", "  \n", "\n", "12", "é", "\u3000日", "'s", "."]), max_size=80
    )
)
@pytest.mark.usefixtures("small")
@SETTINGS
def test_pieces_have_the_tokens_of_the_text(tokenizer, words):
    text = "".join(words).encode()
    lines = b"".join(b"x" + line[:8] + b"\n" for line in text.split(b"\n"))
    whole_tokens = [tokenizer.encode(lines), CHAR.encode(text)]
    parts = [list(tokenize.pieces(data, 12)) for data in (lines, text)]
    assert [b"".join(each) for each in parts] == [lines, text]
    assert all(0 < len(piece) <= 12 for each in parts for piece in each)
    assert tokenizer.encode(lines) == [i for piece in parts[0] for i in tokenizer.encode(piece)]
    assert whole_tokens[1] == [i for piece in parts[1] for i in CHAR.encode(piece)]


@pytest.mark.usefixtures("small")
@given(st.binary(max_size=100))
@SETTINGS
def test_bytes_are_never_lost_between_pieces(tokenizer, data):
    found = corpus.tokenize([(data,), (data[::-1], b"end")], tokenizer)
    assert tokenizer.decode(found.tokens[:].tolist()) == data + data[::-1] + b"end"


def test_where_lines_do_not_help_a_text_is_cut_at_words_and_then_at_characters():
    assert list(tokenize.pieces(b"some words here", 8)) == [b"some", b" words", b" here"]
    assert list(tokenize.pieces("ééé".encode(), 5)) == ["éé".encode(), "é".encode()]
    assert list(tokenize.pieces("a\n\u3000日\n".encode(), 8)) == [b"a\n", "\u3000日\n".encode()]
    assert list(tokenize.pieces(b"\x80" * 7, 3)) == [b"\x80" * 3] * 2 + [b"\x80"]


def change(path, how):
    stat = path.stat()
    if how == "longer":
        path.write_bytes(path.read_bytes() + b"more")
    elif how == "shorter":
        os.truncate(path, 100)
    elif how == "other":
        path.write_bytes(path.read_bytes()[::-1])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    else:
        path.unlink()


def read_again(found, steps):
    list(steps)
    found.close()


@pytest.mark.parametrize("name", ["corpus.txt", "rows.jsonl"])
@pytest.mark.parametrize("how", ["longer", "shorter", "other", "gone"])
def test_a_corpus_that_changes_between_two_readings_is_refused(tmp_path, how, name):
    path = tmp_path / name
    rows = [json.dumps({"text": f"some text {i}"}) for i in range(100)]
    path.write_text("\n".join(rows) if name == "rows.jsonl" else "some text\n" * 100)
    found = corpus.read([str(path)])
    change(path, how)
    with pytest.raises(CorpusError, match=r"has changed while it was read|does not exist"):
        read_again(found, corpus.tokenising(found.documents, CHAR))


@pytest.mark.usefixtures("small")
def test_a_corpus_that_changes_while_it_is_tokenised_is_refused(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"some text\n" * 100)
    for how in ("longer", "shorter"):
        found = corpus.read([str(path)])
        steps = corpus.tokenising(found.documents, CHAR)
        assert 0 < next(steps) <= 12
        change(path, how)
        with pytest.raises(CorpusError, match="has changed while it was read"):
            read_again(found, steps)


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    for module, name in [(reader, "_BLOCK"), (documents, "_READ_WHOLE"), (tokenize, "_PIECE")]:
        monkeypatch.setattr(module, name, 1 << 16)
    monkeypatch.setattr(tokenize, "IN_MEMORY", 1 << 18)
    bytes_only = SimpleNamespace(  # the library's own memory is not counted here
        vocab_size=256,
        end_of_text=0,
        encode_array=lambda data, **_: np.frombuffer(data, np.uint8).astype(np.uint32),
    )
    peaks = []
    for n in (40, 400):
        (tmp_path / "long.txt").write_bytes(b"a line of it\n" * 1000 * n)
        tracemalloc.start()
        found = corpus.read([str(tmp_path / "long.txt")])
        train, held_out, *_ = corpus.train_val_split(found, 0.1)
        assert corpus.subsample(train, 1000) is not train
        kept = corpus.tokenize(train, bytes_only, open_end=True).tokens
        assert corpus.tokenize(held_out, bytes_only).scored_bytes + len(kept) == 13_000 * n
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2_000_000  # of 5 MB and 10 of tokens


def test_how_far_tokenising_is_comes_before_the_plan(tmp_path, monkeypatch):
    from support.runs import request
    from tgen import runs
    from tgen.reports import PreparingReport

    monkeypatch.setattr("tgen.runs.data._REPORT_EVERY", 0.0)
    monkeypatch.setattr(tokenize, "_PIECE", 500)
    reports = list(runs.start(request(tmp_path)))
    kinds = [type(report) for report in reports]
    n = kinds.count(PreparingReport)
    assert n > 2
    assert set(kinds[:n]) == {PreparingReport}
    fractions = [report.fraction_done for report in reports[:n]]
    assert all(a < b for a, b in pairwise(fractions))
    assert fractions[0] > 0
    assert fractions[-1] == 1.0


def test_how_far_it_is_is_shown_now_and_then(monkeypatch, capsys):
    from tgen.cli.train.progress import TrainingProgress
    from tgen.reports import PreparingReport

    with TrainingProgress(quiet=False, json_lines=False) as view:
        view.show(PreparingReport(fraction_done=0.1, seconds_left=80))  # too early for a line
        monkeypatch.setattr(view, "_said", -100.0)
        view.show(PreparingReport(fraction_done=0.34, seconds_left=70))
    assert capsys.readouterr().err == "tokenising: 34% · 1:10 left\n"
