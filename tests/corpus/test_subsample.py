"""Subsampling: whole pieces of documents, in order, spread evenly."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.corpora import make_corpus
from tgen import corpus
from tgen.config.training import TrainConfig
from tgen.runs.tokenizing import max_val_bytes


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("ab\n é", min_size=1, max_size=80), min_size=1, max_size=6),
    max_bytes=st.integers(1, 200),
)
def test_subsample_is_whole_characters_in_order_within_the_limit(texts, max_bytes):
    documents = make_corpus([(text.encode(),) for text in texts]).documents
    pieces = corpus.subsample_documents(documents, max_bytes)
    if documents.n_bytes <= max_bytes:
        assert pieces is documents
    joined, position = b"\0".join(text.encode() for text in texts), 0
    for (piece,) in pieces:
        piece[:].decode()  # no character is cut
        position = joined.index(piece[:], position) + len(piece)
    assert len(pieces) == 1 or pieces.n_bytes <= max_bytes


def test_subsample_is_spread_evenly():
    documents = make_corpus([(bytes([i]) * 10,) for i in range(100)]).documents
    pieces = corpus.subsample_documents(documents, 250)
    assert [piece[:][0] for (piece,) in pieces] == list(range(3, 100, 4))


def test_small_sample_of_a_long_text_has_many_pieces_and_whole_short_documents():
    lines = b"".join(b"%07d\n" % i for i in range(100_000))
    short = [(b"%05d" % i + b"." * 9_000 + b"\n",) for i in range(50)]
    documents = make_corpus([(lines,), *short]).documents
    pieces = [piece[:] for (piece,) in corpus.subsample_documents(documents, 200_000, n_pieces=25)]
    of_lines = [piece for piece in pieces if b"." not in piece]
    assert 10 < len(of_lines) <= 25
    assert sum(map(len, pieces)) <= 200_000
    starts = [int(piece[:7]) for piece in of_lines]
    gaps = [b - a for a, b in zip([0, *starts], [*starts, 100_000], strict=True)]
    assert max(gaps) < 2.5 * 100_000 / len(starts)
    assert all(len(piece) == 9_006 for piece in pieces if b"." in piece)


def test_held_out_sample_depends_on_the_minutes_alone():
    in_minutes = [max_val_bytes(TrainConfig(minutes=minutes)) for minutes in (0.01, 1, 60)]
    assert in_minutes == [1 << 17, 1 << 20, corpus.MAX_VAL_BYTES]
    assert max_val_bytes(TrainConfig(steps=1)) == corpus.MAX_VAL_BYTES
