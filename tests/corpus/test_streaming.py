"""A corpus larger than RAM: reading it in blocks gives the same result as reading it at once."""

import hashlib
import io
import json
import os
import sys
import tracemalloc
from itertools import pairwise, takewhile
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.corpora import tokenize as tokenize_all
from support.corpora import tokenize_counting
from tgen import corpus
from tgen.corpus import document_table, sources, split, tokenize
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
    """Blocks and pieces of a few bytes instead of megabytes."""
    monkeypatch.setattr(document_table, "_BLOCK", 16)
    monkeypatch.setattr(document_table, "_MAX_BYTES_IN_RAM", 8)
    monkeypatch.setattr(sources, "_PIPE_IN_RAM", 10)
    monkeypatch.setattr(sources, "_BLOCK", 7)
    monkeypatch.setattr(tokenize, "_PIECE", 12)
    monkeypatch.setattr(tokenize, "_SEARCH", 5)
    monkeypatch.setattr(tokenize, "IN_MEMORY", 20)
    monkeypatch.setattr(split, "_PIECE", 9)
    monkeypatch.setattr(split, "_LINE", 3)


def whole(documents):
    return [tuple(part[:] for part in document) for document in documents]


def size(document):
    return sum(map(len, document))


def fingerprint(documents):
    digest = hashlib.sha256()
    for document in documents:
        for part in document:
            digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(b"\xff" * 8)
    return digest.hexdigest()


def plain_split(documents, rows, fraction):
    """`split_train_val` of a list of documents in RAM."""
    unique = list(dict.fromkeys(documents))
    boundary = round(sum(map(size, unique)) * (1 - fraction))
    train, val, cut = set(), [], []
    for document in unique:
        inside, boundary = boundary, boundary - size(document)
        is_row = documents.index(document) in rows
        if inside >= size(document) or (is_row and inside >= size(document) / 2):
            train.add(document)
        elif not is_row and inside > 0:
            (text,) = document
            back = range(inside, max(-1, inside - 4), -1)
            at = next((i for i in back if text[i] & 0xC0 != 0x80), inside)
            cut = [(text[:at],)] if at else []
            val.append((text[at:],))
        else:
            val.append(document)
    kept = [document for document in documents if document in train] + cut
    n_dropped = len(documents) - len(kept) - len(val) + bool(cut)
    return [kept, val, bool(cut), n_dropped, sum(map(size, documents)) - sum(map(size, kept + val))]


def plain_subsample(documents, max_bytes):
    """`subsample_documents` of a list of documents in RAM, with the pieces of `small`."""
    n_bytes, max_size = sum(map(size, documents)), max(1, min(9, max_bytes))
    if n_bytes <= max_bytes:
        return documents
    pieces = []
    for document in documents:
        if 0 < size(document) <= max_size or len(document) > 1:
            pieces.append(document)
            continue
        (text,) = document
        while text:
            end = len(text) if len(text) <= max_size else text.rfind(b"\n", 0, max_size) + 1
            if end == 0:
                end = max_size
                while end < len(text) and text[end] & 0xC0 == 0x80:
                    end += 1
            pieces.append((text[:end],))
            text = text[end:]
    taken, n_seen = [], 0
    for piece in pieces:
        n_seen += size(piece)
        if sum(map(size, taken)) + size(piece) <= n_seen * max_bytes / n_bytes:
            taken.append(piece)
    return taken or pieces[:1]


@pytest.mark.usefixtures("small")
@given(TEXTS)
@SETTINGS
def test_texts_of_a_file_equal_those_of_its_content_split_in_ram(tmp_path, parts):
    data = b"".join(parts)
    (tmp_path / "corpus.txt").write_bytes(data)
    expected = [(text,) for text in data.split(b"<|endoftext|>") if text.strip()]
    if not expected:
        with pytest.raises(CorpusError):
            corpus.read([str(tmp_path / "corpus.txt")], reading=None)
        return
    read = corpus.read([str(tmp_path / "corpus.txt")], reading=None)
    assert whole(read.documents) == expected
    indices = np.arange(1, len(expected))
    rest = read.documents.select(indices, np.zeros_like(indices), read.documents.sizes[1:])
    assert whole(rest) == expected[1:]
    assert read.documents.sizes.tolist() == [len(text) for (text,) in expected]
    assert read.sha256 == fingerprint(expected)
    assert read.n_bytes == sum(len(text) for (text,) in expected)


def write_rows(path, rows):
    """Write the rows as JSON; return them as documents."""
    lines, expected = [], []
    for first, second, end in rows:
        row = {"text": first} if second is None else {"prompt": first, "completion": second}
        lines.append(json.dumps(row, ensure_ascii=len(first) % 2 == 0) + end)
        parts = (first,) if second is None else (first, second)
        expected.append(tuple(part.encode("utf-8", "surrogatepass") for part in parts))
    path.write_bytes("".join(lines).encode("utf-8", "surrogatepass"))
    return expected


@pytest.mark.usefixtures("small")
@given(ROWS, TEXTS, st.floats(0, 0.99), st.integers(1, 60))
@SETTINGS
def test_corpus_on_disk_is_split_and_subsampled_as_a_list_in_ram(
    tmp_path, rows, text, fraction, max_bytes
):
    (tmp_path / "a.txt").write_bytes(b"".join(text))
    row_documents = write_rows(tmp_path / "b.jsonl", rows)
    (tmp_path / "c.txt").write_bytes(b"the end\nof it all\n" * 3)
    paths = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.txt")]
    read = corpus.read(paths, reading=None)
    in_ram = whole(read.documents)
    n_texts = len(in_ram) - len(row_documents) - 1
    assert in_ram[n_texts:-1] == row_documents
    assert read.sha256 == fingerprint(in_ram)
    numbers = np.arange(len(in_ram))
    is_row = (numbers >= n_texts) & (numbers < n_texts + len(row_documents))
    assert read.documents.is_row.tolist() == is_row.tolist()
    train, val = corpus.split_train_val(read, fraction)
    expected = plain_split(in_ram, set(np.flatnonzero(is_row).tolist()), fraction)
    dropped = corpus.count_dropped(read, train, val)
    assert [whole(train), whole(val), train.open_end, *dropped] == expected
    for side in (train, val):
        assert side.sizes.tolist() == [*map(size, whole(side))]
        subsampled = corpus.subsample_documents(side, max_bytes)
        assert whole(subsampled) == plain_subsample(whole(side), max_bytes)
    halves = [
        tokenize_all(documents, CHAR, open_end=train.open_end) for documents in (expected[0], train)
    ]
    assert halves[0].ids[:].tolist() == halves[1].ids[:].tolist()


@pytest.mark.usefixtures("small")
def test_long_stdin_goes_through_a_temporary_file(monkeypatch):
    rows = b' \n{"text": "ab"}\n{"prompt": "cd", "completion": "e"}\n'
    text = b"some text, longer"
    for data, expected in [(text, [(text,)]), (rows, [(b"ab",), (b"cd", b"e")])]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        documents = corpus.read(["-"]).documents
        assert whole(documents) == expected


@given(
    st.lists(
        st.sampled_from(["word", " ", "  \n", "\n", "12", "é", "\u3000日", "'s", "."]), max_size=80
    )
)
@pytest.mark.usefixtures("small")
@SETTINGS
def test_pieces_have_the_tokens_of_the_whole_text(tokenizer, words):
    text = "".join(words).encode()
    lines = b"".join(b"x" + line[:8] + b"\n" for line in text.split(b"\n"))
    whole_tokens = [tokenizer.encode(lines), CHAR.encode(text)]
    parts = [list(tokenize.split_text(data, 12)) for data in (lines, text)]
    assert [b"".join(each) for each in parts] == [lines, text]
    assert all(0 < len(piece) <= 12 for each in parts for piece in each)
    assert tokenizer.encode(lines) == [i for piece in parts[0] for i in tokenizer.encode(piece)]
    assert whole_tokens[1] == [i for piece in parts[1] for i in CHAR.encode(piece)]


@pytest.mark.usefixtures("small")
@given(st.binary(max_size=100))
@SETTINGS
def test_bytes_are_never_lost_between_pieces(tokenizer, data):
    result = tokenize_all([(data,), (data[::-1], b"end")], tokenizer)
    assert tokenizer.decode(result.ids[:].tolist()) == data + data[::-1] + b"end"


def test_text_without_lines_is_cut_at_words_and_then_at_characters():
    assert list(tokenize.split_text(b"some words here", 8)) == [b"some", b" words", b" here"]
    assert list(tokenize.split_text("ééé".encode(), 5)) == ["éé".encode(), "é".encode()]
    assert list(tokenize.split_text("a\n\u3000日\n".encode(), 8)) == [b"a\n", "\u3000日\n".encode()]
    assert list(tokenize.split_text(b"\x80" * 7, 3)) == [b"\x80" * 3] * 2 + [b"\x80"]


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


def finish(read, steps):
    list(steps)
    read.close()


@pytest.mark.parametrize("name", ["corpus.txt", "rows.jsonl"])
@pytest.mark.parametrize("how", ["longer", "shorter", "other", "gone"])
def test_corpus_that_changes_between_two_reads_is_an_error(tmp_path, how, name):
    path = tmp_path / name
    rows = [json.dumps({"text": f"some text {i}"}) for i in range(100)]
    path.write_text("\n".join(rows) if name == "rows.jsonl" else "some text\n" * 100)
    read = corpus.read([str(path)])
    change(path, how)
    with pytest.raises(CorpusError, match=r"changed while it was being read|does not exist"):
        finish(read, corpus.tokenize_documents(read.documents, CHAR))


@pytest.mark.usefixtures("small")
def test_corpus_that_changes_while_it_is_tokenized_is_an_error(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"some text\n" * 100)
    for how in ("longer", "shorter"):
        read = corpus.read([str(path)])
        steps = corpus.tokenize_documents(read.documents, CHAR)
        assert 0 < next(steps) <= 12
        change(path, how)
        with pytest.raises(CorpusError, match="changed while it was being read"):
            finish(read, steps)


def test_memory_use_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    for module, name in [
        (document_table, "_BLOCK"),
        (sources, "_BLOCK"),
        (document_table, "_MAX_BYTES_IN_RAM"),
        (tokenize, "_PIECE"),
    ]:
        monkeypatch.setattr(module, name, 1 << 16)
    monkeypatch.setattr(tokenize, "IN_MEMORY", 1 << 18)
    bytes_only = SimpleNamespace(  # the library's own memory is not counted
        vocab_size=256,
        end_of_text=0,
        encode_corpus=lambda data, **_: (np.frombuffer(data, np.uint8).astype(np.uint32), 0),
    )
    peaks = []
    for n in (40, 400):
        (tmp_path / "long.txt").write_bytes(b"a line of it\n" * 1000 * n)
        tracemalloc.start()
        read = corpus.read([str(tmp_path / "long.txt")])
        train, val = corpus.split_train_val(read, 0.1)
        assert corpus.subsample_documents(train, 1000) is not train
        tokens = tokenize_all(train, bytes_only, open_end=True).ids
        _, n_val, _ = tokenize_counting(val, bytes_only)
        assert n_val + len(tokens) == 13_000 * n
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2_000_000  # of 5 MB of text and 10 MB of tokens


def test_progress_of_tokenizing_is_reported_before_the_plan(tmp_path, monkeypatch):
    from support.runs import request
    from tgen import runs
    from tgen.reports.training import PhaseReport

    monkeypatch.setattr("tgen.runs.tokenizing._REPORT_SECONDS", 0.0)
    monkeypatch.setattr(tokenize, "_PIECE", 500)
    reports = list(
        takewhile(lambda one: isinstance(one, PhaseReport), runs.start(request(tmp_path)))
    )
    known = [report for report in reports if report.fraction_done is not None]
    fractions = [report.fraction_done for report in known if report.phase == "tokenizing"]
    assert len(fractions) > 2
    assert {one.phase for one in known} == {"reading the corpus", "tokenizing"}
    assert all(a < b for a, b in pairwise(fractions))
    assert fractions[0] > 0
    assert fractions[-1] == 1.0


def test_progress_of_reading_is_reported_with_the_time_left(tmp_path, monkeypatch):
    from support.runs import request
    from tgen.runs import prepare

    monkeypatch.setattr("tgen.runs.tokenizing._REPORT_SECONDS", 0.0)
    (tmp_path / "a.csv").write_bytes(b"text\n" + b"a line\n" * 999)
    table = request(tmp_path, corpus=[str(tmp_path / "a.csv")])
    reports = list(prepare._open_corpus(table, table.train))
    assert {report.phase for report in reports} == {"reading the corpus"}
    done = [(one.fraction_done, one.seconds_left) for one in reports[1:]]
    assert len(done) > 100
    assert all(a[0] < b[0] for a, b in pairwise(done))
    assert done[-1] == (1.0, 0.0)


def test_progress_of_tokenizing_is_printed_at_intervals(monkeypatch, capsys):
    from tgen.cli.train.progress import TrainingProgress
    from tgen.reports.training import PhaseReport

    with TrainingProgress(json_lines=False) as view:
        view.show(PhaseReport(phase="tokenizing", fraction_done=0.1, seconds_left=80))  # too early
        monkeypatch.setattr(view, "_last_line", -100.0)
        view.show(PhaseReport(phase="tokenizing", fraction_done=0.34, seconds_left=70))
    assert capsys.readouterr().err == "tokenizing: 34% · 1:10 left\n"
