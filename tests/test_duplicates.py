"""Held-out text that was trained on: which documents go, which stay, and what share is left."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tgen import corpus
from tgen.corpus import Corpus, Split, drop_duplicates, shared_share

A, B, C, D = (b"a",), (b"bb",), (b"c", b"cc"), (b"dddd",)


def test_a_held_out_document_that_is_trained_on_goes():
    kept, n, n_bytes = drop_duplicates(Split([A, B, C], [B, D, C, D, (b"ccc",)], cut=False))
    assert kept == Split([A, B, C], [D, D, (b"ccc",)], cut=False)
    assert (n, n_bytes) == (2, 5)


def test_nothing_equal_changes_nothing_and_all_equal_leaves_nothing():
    split = Split([A, B], [C, D], cut=False)
    assert drop_duplicates(split) == (split, 0, 0)
    assert drop_duplicates(Split([A, B], [A, A], cut=False)) == (Split([A, B], [], False), 2, 2)


def test_the_pieces_of_a_cut_document_stay_and_equal_nothing():
    split = Split([A, B], [A, B, A, D], cut=True)  # B and A are pieces of one document
    assert drop_duplicates(split) == (Split([A, B], [A, B, D], cut=True), 1, 1)


@given(st.lists(st.sampled_from([b"aa", b"bbb", b"cccc", b"d" * 9]), min_size=1), st.floats(0, 1))
@settings(deadline=None)
def test_a_cut_split_still_joins_where_it_was_cut(texts, fraction):
    split = corpus.split(Corpus([(t,) for t in texts], rows=frozenset(), skipped=[]), fraction)
    kept, n, n_bytes = drop_duplicates(split)
    assert (kept.train, kept.cut) == (split.train, split.cut)
    assert len(split.held_out) - len(kept.held_out) == n
    assert sum(len(t) for (t,) in split.held_out) - sum(len(t) for (t,) in kept.held_out) == n_bytes
    if split.cut:
        assert kept.held_out[0] == split.held_out[0]
    whole = split.train[:-1] if split.cut else split.train
    assert set(kept.held_out[split.cut :]) == set(split.held_out[split.cut :]) - set(whole)


def slow_share(train: bytes, held_out: bytes, run: int) -> float:
    covered = set()
    for i in range(len(held_out) - run + 1):
        if held_out[i : i + run] in train:
            covered |= set(range(i, i + run))
    return len(covered) / len(held_out) if held_out else 0.0


words = st.lists(st.sampled_from([b"a", b"\0", b"king", b"a crown "]), max_size=20).map(b"".join)


@given(words, words, st.integers(1, 12))
@settings(deadline=None)
def test_the_share_is_the_one_counted_directly(train, held_out, run):
    assert shared_share(train, held_out, run=run) == slow_share(train, held_out, run)


def test_a_run_must_be_long_enough():
    passage = bytes(range(64))
    assert shared_share(b"x" + passage + b"y", b"1" + passage + b"2" * 63) == 0.5
    assert shared_share(b"x" + passage[:-1] + b"y", b"1" + passage + b"2" * 63) == 0
    assert shared_share(passage, b"") == 0
