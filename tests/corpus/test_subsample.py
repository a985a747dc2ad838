"""Subsampling: whole pieces of documents, in order, spread evenly."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.corpora import make_corpus
from tgen import corpus


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
