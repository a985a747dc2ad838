"""What is read, how it is split, and in which order it is seen."""

import io
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen import corpus
from tgen.corpus import Corpus, TokenDataset
from tgen.errors import CorpusError
from tgen.tokenizer import train_char

CHAR = train_char([b"abc"])


def test_files_folders_globs_and_stdin(tmp_path, monkeypatch):
    (tmp_path / "b.txt").write_bytes(b"bb")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_bytes(b"aa\xff")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    both = [(b"bb",), (b"aa\xff",)]
    folder = corpus.read([str(tmp_path)])
    assert list(folder.documents) == both
    assert folder.skipped == [str(tmp_path / "picture.png")]
    pattern = corpus.read([str(tmp_path / "**" / "*.txt")])
    assert list(pattern.documents) == both
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin")))
    assert list(corpus.read(["-", str(tmp_path / "b.txt")]).documents) == [
        (b"from stdin",),
        (b"bb",),
    ]


def test_rows_and_documents(tmp_path):
    rows = [{"text": "é"}, {"prompt": "p ", "completion": "c"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    read = corpus.read([str(tmp_path / "rows.jsonl")])
    assert list(read.documents) == [("é".encode(),), (b"p ", b"c")]
    (tmp_path / "two.txt").write_bytes(b"one<|endoftext|>two\n<|endoftext|>\n")
    assert list(corpus.read([str(tmp_path / "two.txt")]).documents) == [(b"one",), (b"two\n",)]
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": 1}\n')
    with pytest.raises(CorpusError, match="line 2"):
        corpus.read([str(tmp_path / "bad.jsonl")])


@pytest.mark.parametrize("content", [b"", b"\n\n", None])
def test_nothing_to_read_is_an_error(tmp_path, content):
    if content is not None:
        (tmp_path / "corpus.txt").write_bytes(content)
    with pytest.raises(CorpusError):
        corpus.read([str(tmp_path / "corpus.txt")])


def test_parts_are_tokenised_apart_and_an_end_follows_each_document():
    text = corpus.tokenize([(b"ab", b"c"), (b"a",)], CHAR)
    a, b, c = CHAR.encode(b"abc")
    assert text.tokens.tolist() == [a, b, c, 0, a, 0]


def test_a_text_cut_by_the_split_ends_only_where_it_ends():
    text = b"abcabcabca"
    train, held_out, cut, *_ = corpus.train_val_split(
        Corpus([(text,)], rows=frozenset(), skipped=[]), 0.5
    )
    halves = [corpus.tokenize(train, CHAR, open_end=cut), corpus.tokenize(held_out, CHAR)]
    together = np.concatenate([half.tokens for half in halves])
    assert together.tolist() == corpus.tokenize([(text,)], CHAR).tokens.tolist()


@given(st.lists(st.text(min_size=1), min_size=1), st.floats(0, 0.99))
@settings(deadline=None)
def test_a_split_loses_nothing_and_cuts_no_character(texts, fraction):
    documents = [(text.encode("utf-8", "surrogatepass"),) for text in dict.fromkeys(texts)]
    train, held_out, *_ = corpus.train_val_split(
        Corpus(documents, rows=frozenset(), skipped=[]), fraction
    )
    together = b"".join(part for document in train + held_out for part in document)
    assert together == b"".join(part for (part,) in documents)
    n_train = sum(len(text) for (text,) in train)
    assert abs(n_train - round(len(together) * (1 - fraction))) <= 3
    for (text,) in train[-1:]:
        if "\ud800" <= max(text.decode("utf-8", "surrogatepass"), default="") <= "\udfff":
            continue
        text.decode("utf-8", "surrogatepass")


def test_rows_are_never_cut_and_the_border_is_the_nearest_rows_end():
    documents = [(b"what is statquest", b"awesome"), (b"statquest is what", b"awesome")]
    rows = Corpus(documents, rows=frozenset({0, 1}), skipped=[])
    for fraction, n_train in [(0.0, 2), (0.1, 2), (0.4, 1), (0.6, 1), (0.9, 0)]:
        train, held_out, cut, *_ = corpus.train_val_split(rows, fraction)
        assert (train, held_out) == (documents[:n_train], documents[n_train:])
        assert not cut


def test_a_row_whose_middle_is_the_border_is_learnt():
    rows = Corpus([(b"ab", b"cd")], rows=frozenset({0}), skipped=[])
    assert [len(corpus.train_val_split(rows, share).train) for share in (0.5, 0.75)] == [1, 0]


def store(n_train: int, n_held_out: int, context_length: int, batch_size: int = 4) -> TokenDataset:
    return TokenDataset(
        train=np.arange(n_train, dtype=np.uint16),
        held_out=np.arange(n_train, n_train + n_held_out, dtype=np.uint16),
        held_out_bytes=n_held_out,
        context_length=context_length,
        batch_size=batch_size,
        seed=7,
    )


def test_batches_are_windows_and_a_function_of_the_step():
    batches = store(1000, 0, 16)
    for step in (0, 1, 500):
        windows = batches.batch(step).tokens
        assert windows.shape == (4, 17)
        assert (np.diff(windows, axis=1) == 1).all()
        assert np.array_equal(windows, store(1000, 0, 16).batch(step).tokens)
    assert not np.array_equal(batches.batch(0).tokens, batches.batch(1).tokens)


def test_an_epoch_sees_every_token_once():
    batches = store(1601, 0, 16)  # 100 windows: 25 steps of 4
    seen = np.concatenate([batches.batch(step).tokens[:, :-1].ravel() for step in range(25)])
    assert len(np.unique(seen)) >= 1585  # one window may lie over the border


@given(st.integers(2, 200), st.integers(1, 200), st.integers(1, 50))
@settings(deadline=None)
def test_each_held_out_token_is_predicted_exactly_once(n_train, n_held_out, context_length):
    windows = store(n_train, n_held_out, context_length).held_out_windows(1 << 20)
    targets = np.concatenate([w.tokens[:, 1:].ravel() for w in windows])
    assert targets.tolist() == list(range(n_train, n_train + n_held_out))


def test_the_smallest_corpus_has_batches():
    assert store(2, 0, 1).batch(3).tokens.tolist() == [[0, 1]] * 4
