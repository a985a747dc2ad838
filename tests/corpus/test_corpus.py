"""Reading a corpus, splitting it, and the order of its batches."""

import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.corpora import make_corpus, tokenize
from tgen import corpus
from tgen.corpus import TokenDataset, Tokens, jsonl
from tgen.corpus.dataset import _count_windows
from tgen.errors import CorpusError
from tgen.tokenizer import train_char

CHAR = train_char([b"abc"])


def test_files_directories_globs_and_stdin_are_read(tmp_path, monkeypatch):
    (tmp_path / "b.txt").write_bytes(b"bb")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_bytes(b"aa\xff")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    both = [(b"bb",), (b"aa\xff",)]
    folder = corpus.read([str(tmp_path)])
    assert list(folder.documents) == both
    note, skipped = folder.notes
    assert note.startswith(f"33.33% of the bytes of {tmp_path / 'deep' / 'a.txt'} are not UTF-8")
    assert skipped == f"skipped {tmp_path / 'picture.png'}: a PNG picture"
    pattern = corpus.read([str(tmp_path / "**" / "*.txt")])
    assert list(pattern.documents) == both
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin")))
    assert list(corpus.read(["-", str(tmp_path / "b.txt")]).documents) == [
        (b"from stdin",),
        (b"bb",),
    ]


def test_rows_and_separated_texts_are_documents(tmp_path):
    rows = [{"text": "é"}, {"prompt": "p ", "completion": "c"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    read = corpus.read([str(tmp_path / "rows.jsonl")])
    assert list(read.documents) == [("é".encode(),), (b"p ", b"c")]
    (tmp_path / "two.txt").write_bytes(b"one<|endoftext|>two\n<|endoftext|>\n")
    assert list(corpus.read([str(tmp_path / "two.txt")]).documents) == [(b"one",), (b"two\n",)]
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": 1}\n')
    with pytest.raises(CorpusError, match="line 2"):
        corpus.read([str(tmp_path / "bad.jsonl")])


def test_row_too_long_for_memory_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "_BLOCK", 10)
    monkeypatch.setattr(jsonl, "_MAX_LINE", 100)
    rows = "\n".join(json.dumps({"text": "x" * n}) for n in (80, 70))
    (tmp_path / "rows.jsonl").write_text(rows)
    assert [len(text) for (text,) in corpus.read([str(tmp_path)]).documents] == [80, 70]
    (tmp_path / "rows.jsonl").write_text(rows + "\n" + json.dumps({"text": "x" * 200}))
    start = len(rows) + 1
    with pytest.raises(CorpusError, match=f"row of more than 100 bytes at byte {start}"):
        corpus.read([str(tmp_path / "rows.jsonl")])


@pytest.mark.parametrize("content", [b"", b"\n\n", None])
def test_empty_corpus_is_an_error(tmp_path, content):
    if content is not None:
        (tmp_path / "corpus.txt").write_bytes(content)
    with pytest.raises(CorpusError):
        corpus.read([str(tmp_path / "corpus.txt")])


@pytest.mark.parametrize(
    ("name", "content"),
    [("c.txt", b"\n\n\n"), ("c.txt", b"<|endoftext|>" * 500), ("c.jsonl", b'{"text": ""}\n')],
)
def test_corpus_without_text_is_not_called_empty(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match="has no text besides line breaks and end-of-text"):
        corpus.read([str(tmp_path / name)])


def test_parts_are_tokenized_separately_and_an_end_follows_each_document():
    text = tokenize([(b"ab", b"c"), (b"a",)], CHAR)
    a, b, c = CHAR.encode(b"abc")
    assert text.ids.tolist() == [a, b, c, 0, a, 0]


def test_text_cut_by_the_split_has_one_end_of_text():
    text = b"abcabcabca"
    train, val = corpus.split_train_val(make_corpus([(text,)]), 0.5)
    halves = [tokenize(train, CHAR, open_end=train.open_end), tokenize(val, CHAR)]
    joined = np.concatenate([half.ids for half in halves])
    assert joined.tolist() == tokenize([(text,)], CHAR).ids.tolist()


@given(st.lists(st.text(min_size=1), min_size=1), st.floats(0, 0.99))
@settings(deadline=None)
def test_split_loses_nothing_and_cuts_no_character(texts, fraction):
    documents = [(text.encode("utf-8", "surrogatepass"),) for text in dict.fromkeys(texts)]
    train, val = corpus.split_train_val(make_corpus(documents), fraction)
    joined = b"".join(part for document in [*train, *val] for part in document)
    assert joined == b"".join(part for (part,) in documents)
    n_train = sum(len(text) for (text,) in train)
    assert abs(n_train - round(len(joined) * (1 - fraction))) <= 3
    for (text,) in list(train)[-1:]:
        if "\ud800" <= max(text.decode("utf-8", "surrogatepass"), default="") <= "\udfff":
            continue
        text.decode("utf-8", "surrogatepass")


def test_rows_are_never_cut_and_the_boundary_is_the_nearest_end_of_a_row():
    documents = [(b"what is statquest", b"awesome"), (b"statquest is what", b"awesome")]
    rows = make_corpus(documents, rows=True)
    for fraction, n_train in [(0.0, 2), (0.1, 2), (0.4, 1), (0.6, 1), (0.9, 0)]:
        train, val = corpus.split_train_val(rows, fraction)
        assert (list(train), list(val)) == (documents[:n_train], documents[n_train:])
        assert not train.open_end


def test_row_with_the_boundary_in_its_middle_is_trained_on():
    rows = make_corpus([(b"ab", b"cd")], rows=True)
    assert [len(corpus.split_train_val(rows, share)[0]) for share in (0.5, 0.75)] == [1, 0]


def make_dataset(
    n_train: int, n_val: int, context_length: int, batch_size: int = 4
) -> TokenDataset:
    return TokenDataset(
        train=Tokens(np.arange(n_train, dtype=np.uint16)),
        val=Tokens(np.arange(n_train, n_train + n_val, dtype=np.uint16)),
        val_bytes=n_val,
        context_length=context_length,
        batch_size=batch_size,
        seed=7,
    )


def test_batches_are_windows_and_a_function_of_the_step():
    dataset = make_dataset(1000, 0, 16)
    for step in (0, 1, 500):
        windows = dataset.batch(step).tokens
        assert windows.shape == (4, 17)
        assert (np.diff(windows, axis=1) == 1).all()
        assert np.array_equal(windows, make_dataset(1000, 0, 16).batch(step).tokens)
    assert not np.array_equal(dataset.batch(0).tokens, dataset.batch(1).tokens)


def epoch_targets(dataset: TokenDataset, epoch: int) -> list[int]:
    """Return the targets of an epoch, each as often as it is one."""
    n_windows, _ = _count_windows(len(dataset.train.ids) - 1, dataset.context_length)
    targets = []
    for window in range(epoch * n_windows, (epoch + 1) * n_windows):
        tokens, mask, _ = dataset.batch(window)
        targets.append(tokens[:, 1:] if mask is None else tokens[:, 1:][mask])
    return sorted(np.concatenate([part.ravel() for part in targets]).tolist())


@given(st.integers(2, 400), st.integers(1, 60), st.integers(0, 3))
@settings(deadline=None)
def test_each_token_but_the_first_is_a_target_exactly_once_per_epoch(n, context_length, epoch):
    dataset = make_dataset(n, 0, context_length, batch_size=1)
    assert epoch_targets(dataset, epoch) == list(range(1, n))


@given(st.integers(2, 400), st.integers(2, 60))
@settings(deadline=None)
def test_windows_are_cut_at_many_places_and_few_are_wasted(n, context_length):
    n_windows, sizes = _count_windows(n - 1, context_length)
    assert n_windows * context_length < n - 1 + 1.5 * context_length + 1
    if n > context_length + 1:
        assert len(sizes) >= context_length // 2 - 1


def test_targets_of_a_short_window_have_the_text_before_them():
    dataset = make_dataset(1000, 0, 125, batch_size=1)
    for step in range(9):
        tokens, mask, _ = dataset.batch(step)
        n = 125 if mask is None else int(mask.sum())
        assert (np.diff(tokens[0, : n + 1]) == 1).all()
        assert mask is None or mask[0, :n].all()


def test_text_shorter_than_a_window_is_predicted_whatever_the_limit():
    dataset = make_dataset(50, 30, 100)
    (batch,) = dataset.val_windows(10)
    assert batch.tokens.shape == (1, 31)
    (batch,) = dataset.train_windows(10)
    assert batch.tokens.shape == (1, 50)


def test_short_last_window_without_a_target_is_omitted():
    dataset = make_dataset(50, 30, 20)
    masks = np.arange(30) < 20
    assert sum(1 for _ in dataset.val_windows(1000)) == 2
    (batch,) = replace(dataset, val=replace(dataset.val, loss_mask=masks)).val_windows(1000)
    assert batch.loss_mask.sum() == 20


def test_loss_mask_of_the_text_holds_in_short_windows():
    masks = np.arange(1000) % 3 == 0
    dataset = make_dataset(1000, 0, 125, batch_size=1)
    dataset = replace(dataset, train=replace(dataset.train, loss_mask=masks))
    assert epoch_targets(dataset, 0) == list(range(3, 1000, 3))


@given(st.integers(2, 200), st.integers(1, 200), st.integers(1, 50))
@settings(deadline=None)
def test_each_validation_token_is_predicted_exactly_once(n_train, n_val, context_length):
    windows = make_dataset(n_train, n_val, context_length).val_windows(1 << 20)
    targets = np.concatenate([w.tokens[:, 1:].ravel() for w in windows])
    assert targets.tolist() == list(range(n_train, n_train + n_val))


def test_smallest_corpus_has_batches():
    assert make_dataset(2, 0, 1).batch(3).tokens.tolist() == [[0, 1]] * 4
