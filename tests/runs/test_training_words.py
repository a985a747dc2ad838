"""The words of a run's stored tokens, at the border of training and held-out text."""

import numpy as np
import pytest

from tgen.runs import saved_state
from tgen.runs.training_words import read_training_words

RUN = {"run_id": "1", "corpus_sha256": "c", "tokenizer_sha256": "t"}
TOKENS = [*(bytes([byte]) for byte in range(256)), b""]  # the last one is a control token
CONTROL = [256]


def words_of(out, train, val):
    """Return the words of a run with these tokens as a set of strings."""
    arrays = {"train": np.array([*train], np.uint16), "val": np.array([*val], np.uint16)}
    saved_state.save_record(out, RUN, saved_state.save_tokens(out, RUN, arrays))
    return {word.decode() for word in read_training_words(out, TOKENS)}


@pytest.fixture
def out(tmp_path):
    (tmp_path / "training").mkdir()
    return tmp_path


@pytest.mark.parametrize("n_bytes", [8, 1 << 22])
@pytest.mark.parametrize(
    ("train", "val", "expected"),
    [
        ("the king\na quo", "kka ran\nto it", "the king a ran to it"),
        ("the quo", "kka", "the"),
        ("the na\u00ef", "ve king", "the king"),
        ("the " + "quo" * 150, "kka king", "the king"),
        ("the king", ", a queen", "the king a queen"),
        ("the king ", "queen", "the king queen"),
        ("the king\n", "queen", "the king queen"),
        ("the king", "", "the king"),
    ],
)
def test_a_word_that_the_border_cuts_is_left_out(out, monkeypatch, n_bytes, train, val, expected):
    monkeypatch.setattr("tgen.storage.disk_array._BLOCK", n_bytes)
    assert words_of(out, train.encode(), val.encode()) == set(expected.split())
    # A document that begins with a control token may also be cut
    marked = [*CONTROL, *val.encode()] if val else []
    assert words_of(out, train.encode(), marked) == set(expected.split())


def test_words_beside_the_end_of_a_document_are_whole(out):
    train, val = [*b"the quo", *CONTROL], [*b"kka", *CONTROL, *b"ran", *CONTROL]
    assert words_of(out, train, val) == {"the", "quo", "kka", "ran"}
