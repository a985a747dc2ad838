"""Copies stay in one split, and the overlap of the splits is measured."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.corpora import make_corpus
from tgen.corpus import count_dropped, overlap_fraction, split_train_val

A, B, C, D = (b"a" * 4,), (b"b" * 4,), (b"c", b"ccc"), (b"dddd",)


def split(documents, fraction, *, rows=True):
    """Both splits as lists, whether a text is cut, and what is dropped."""
    corpus = make_corpus(documents, rows=rows)
    train, val = split_train_val(corpus, fraction)
    return [list(train), list(val), train.open_end, *count_dropped(corpus, train, val)]


def test_copies_stay_in_one_split_and_validation_documents_count_once():
    assert split([A, D, B, A, C, D, D], 0.25) == [[A, D, B, A, D, D], [C], False, 0, 0]
    assert split([A, C, B, A, D, C, D, A], 0.5) == [[A, C, A, C, A], [B, D], False, 1, 4]


def test_repeated_rows_leave_rows_for_validation():
    many = [(f"question {i}".encode(), b"answer") for i in range(20)]
    train, val, *_ = split(many * 10, 0.1)
    assert val == many[-2:]
    assert train == many[:-2] * 10


def test_copies_of_a_cut_text_are_dropped():
    texts = [A, (b"xyxyz" * 4,), A, (b"xyxyz" * 4,)]
    assert split(texts, 0.5, rows=False) == [
        *([A, A, (b"xyxyzxyx",)], [(b"yzxyxyzxyxyz",)]),
        *(True, 1, 20),
    ]


texts = st.lists(st.sampled_from([b"aa", b"bbb", b"cccc", b"d" * 9]), min_size=1)


@given(texts, st.floats(0, 1))
@settings(deadline=None)
def test_splits_are_disjoint_and_lose_nothing(texts, fraction):
    train, val, cut, n_dropped, dropped_bytes = split([(t,) for t in texts], fraction, rows=False)
    whole = train[:-1] if cut else train
    assert not set(whole) & set(val)
    joined = [train[-1] + val[0]] if cut else []
    restored = whole + [(b"".join(parts),) for parts in joined] + val[cut:]
    assert set(restored) == {(t,) for t in texts}
    assert len(restored) + n_dropped == len(texts)
    assert sum(len(t) for (t,) in restored) + dropped_bytes == sum(map(len, texts))


def plain_overlap(train: bytes, val: bytes, run: int) -> float:
    covered = set()
    for i in range(len(val) - run + 1):
        if val[i : i + run] in train:
            covered |= set(range(i, i + run))
    return len(covered) / len(val) if val else 0.0


words = st.lists(st.sampled_from([b"a", b"\0", b"king", b"a crown "]), max_size=20).map(b"".join)


@given(words, words, st.integers(1, 12))
@settings(deadline=None)
def test_overlap_equals_the_plain_count(train, val, run):
    assert overlap_fraction(train, val, run=run) == plain_overlap(train, val, run)


def test_overlap_ignores_short_runs():
    passage = bytes(range(64))
    assert overlap_fraction(b"x" + passage + b"y", b"1" + passage + b"2" * 63) == 0.5
    assert overlap_fraction(b"x" + passage[:-1] + b"y", b"1" + passage + b"2" * 63) == 0
    assert overlap_fraction(passage, b"") == 0
