"""Held-out text that is trained on: copies stay on their side, and what share is left."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.corpus import Corpus, Split, overlap_fraction, train_val_split

A, B, C, D = (b"a" * 4,), (b"b" * 4,), (b"c", b"ccc"), (b"dddd",)


def rows(*documents):
    return Corpus(list(documents), rows=frozenset(range(len(documents))), skipped=[])


def test_copies_stay_on_their_side_and_what_is_held_out_counts_once():
    assert train_val_split(rows(A, D, B, A, C, D, D), 0.25) == Split([A, D, B, A, D, D], [C])
    assert train_val_split(rows(A, C, B, A, D, C, D, A), 0.5) == Split(
        [A, C, A, C, A], [B, D], left_out=1, left_out_bytes=4
    )


def test_rows_that_repeat_leave_rows_to_hold_out():
    many = [(f"question {i}".encode(), b"answer") for i in range(20)]
    train, held_out, *_ = train_val_split(rows(*many * 10), 0.1)
    assert held_out == many[-2:]
    assert train == many[:-2] * 10


def test_a_cut_text_and_its_copies_do_not_meet():
    text = Corpus([A, (b"xyxyz" * 4,), A, (b"xyxyz" * 4,)], rows=frozenset(), skipped=[])
    assert train_val_split(text, 0.5) == Split(
        [A, A, (b"xyxyzxyx",)], [(b"yzxyxyzxyxyz",)], cut=True, left_out=1, left_out_bytes=20
    )


texts = st.lists(st.sampled_from([b"aa", b"bbb", b"cccc", b"d" * 9]), min_size=1)


@given(texts, st.floats(0, 1))
@settings(deadline=None)
def test_nothing_is_on_both_sides_and_nothing_is_lost(texts, fraction):
    found = train_val_split(Corpus([(t,) for t in texts], rows=frozenset(), skipped=[]), fraction)
    whole = found.train[:-1] if found.cut else found.train
    assert not set(whole) & set(found.held_out)
    joined = [found.train[-1] + found.held_out[0]] if found.cut else []
    back = whole + [(b"".join(parts),) for parts in joined] + found.held_out[found.cut :]
    assert set(back) == {(t,) for t in texts}
    assert len(back) + found.left_out == len(texts)
    assert sum(len(t) for (t,) in back) + found.left_out_bytes == sum(map(len, texts))


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
    assert overlap_fraction(train, held_out, run=run) == slow_share(train, held_out, run)


def test_a_run_must_be_long_enough():
    passage = bytes(range(64))
    assert overlap_fraction(b"x" + passage + b"y", b"1" + passage + b"2" * 63) == 0.5
    assert overlap_fraction(b"x" + passage[:-1] + b"y", b"1" + passage + b"2" * 63) == 0
    assert overlap_fraction(passage, b"") == 0
