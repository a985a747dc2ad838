"""Tokenizers trained here: bytes survive encoding, streaming equals decoding."""

import json
import threading
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models import TEXT
from tgen.errors import TokenizerError, UsageError
from tgen.tokenizer import (
    END_OF_TEXT,
    TextStream,
    Tokenizer,
    make_tokenizer,
    train_bpe,
    train_char,
)
from tgen.tokenizer.patterns import LINE_STARTS
from tgen.tokenizer.tokenizer import split_blocks
from tgen.tokenizer.tokenizer_json import BYTE_CHARACTERS
from tgen.tokenizer.train import split_long_runs

CHAR, BPE = train_char([TEXT]), train_bpe([TEXT], vocab_size=320)
KINDS = [CHAR, BPE]
# Text with characters of 1 to 4 bytes, and bytes that are not text.
any_bytes = st.one_of(
    st.binary(),
    st.text().map(str.encode),
    st.lists(
        st.one_of(
            st.binary(max_size=3),
            st.sampled_from(["日本", "🦋", "é", "the king", END_OF_TEXT]).map(str.encode),
        )
    ).map(b"".join),
)


@given(any_bytes)
@settings(max_examples=100, deadline=None)
def test_any_bytes_survive_encoding(data):
    for tokenizer in KINDS:
        assert tokenizer.decode(tokenizer.encode(data)) == data


def merging_everything() -> str:
    """A tokenizer that merges any two of some characters, so that its ids show each word's ends."""
    content = json.loads(BPE.json)
    vocab = content["model"]["vocab"]
    signs = [BYTE_CHARACTERS[byte] for byte in b"azAZ09s'! \t\n\r\x1c\xc3"]
    pairs = [pair for pair in product(signs, signs) if "".join(pair) not in vocab]
    for pair in pairs:
        vocab["".join(pair)] = len(vocab)
    content["model"]["merges"] += [list(pair) for pair in pairs]
    return json.dumps(content)


MERGING = merging_everything()
ascii_text = (
    st.text("azAZ09s'! \t\n\r\x1c", max_size=20)
    | st.text(st.characters(max_codepoint=127), max_size=30)
    | st.sampled_from(
        [
            "we'll",
            "WE'LL",
            "a  \n\n b",
            "12345",
            "?!\r\n",
            " \t",
            "<|endoftext|>",
            "!\x1c!",
            "zz9Z 09",
        ]
    )
)


@given(st.lists(ascii_text.map(str.encode) | any_bytes, max_size=8).map(b"\n".join), st.booleans())
@settings(max_examples=60, deadline=None)
def test_words_that_are_looked_up_have_the_ids_of_the_library(data, continuation):
    fast = Tokenizer(MERGING)
    plain = Tokenizer(MERGING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tgen.tokenizer.tokenizer._SMALL_BLOCK", 4)
        patch.setattr("tgen.tokenizer.word_ids._MAX_IDS", 9)
        for _ in range(2):  # with known words, too
            ids, n_replaced = fast.encode_corpus(data, continuation=continuation)
            assert ids.tolist() == plain.encode(data, continuation=continuation)
            assert n_replaced == 0


@given(any_bytes)
@settings(max_examples=100, deadline=None)
def test_streamed_text_equals_decoded_text_in_whole_characters(data):
    for tokenizer in KINDS:
        stream = TextStream()
        pieces = [stream.feed(tokenizer.token_bytes(i)) for i in tokenizer.encode(data)]
        assert b"".join(pieces) + stream.flush() == data
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        for piece in pieces:
            piece.decode()  # never part of a character


@given(st.binary(), st.lists(st.integers(0, 40)))
@settings(max_examples=100, deadline=None)
def test_stream_loses_no_bytes_wherever_they_are_cut(data, cuts):
    stream, out, start = TextStream(), b"", 0
    for size in cuts:
        out += stream.feed(data[start : start + size])
        start += size
    assert out + stream.feed(data[start:]) + stream.flush() == data


def test_stream_returns_a_character_with_its_last_byte():
    stream = TextStream()
    assert [stream.feed(bytes([b])) for b in "é🦋!".encode()] == [
        b"",
        "é".encode(),
        b"",
        b"",
        b"",
        "🦋".encode(),
        b"!",
    ]
    assert stream.feed("日".encode()[:2]) == b""
    assert stream.flush() == "日".encode()[:2]


def test_char_has_one_token_per_character_of_the_corpus():
    for character in set(TEXT.decode()):
        assert len(CHAR.encode(character.encode())) == 1
    assert len(CHAR.encode("ж".encode())) == 2  # unseen: its bytes


def test_char_limits_its_vocabulary_to_the_most_frequent_characters():
    tokenizer = train_char(["日日日本".encode()], vocab_size=260)
    assert tokenizer.vocab_size == 260
    assert len(tokenizer.encode("日".encode())) == 1
    assert len(tokenizer.encode("本".encode())) > 1


def test_special_tokens_spelled_in_a_text_remain_text():
    for tokenizer in KINDS:
        ids = tokenizer.encode(f"a{END_OF_TEXT}b".encode())
        assert tokenizer.end_of_text is not None
        assert tokenizer.end_of_text not in ids
        assert tokenizer.decode([tokenizer.end_of_text]) == b""


def test_negative_ids_are_refused():
    for tokenizer in KINDS:
        assert tokenizer.decode([tokenizer.vocab_size]) == b""
        with pytest.raises(UsageError, match="token: invalid value -1"):
            tokenizer.decode([-1])


def test_tokenizer_survives_its_json():
    for tokenizer in KINDS:
        again = Tokenizer(tokenizer.json)
        assert again.encode(TEXT) == tokenizer.encode(TEXT)
        assert (again.vocab_size, again.end_of_text, again.pad) == (tokenizer.vocab_size, 0, 1)


def test_training_is_deterministic():
    assert train_bpe([TEXT], vocab_size=320).json == BPE.json
    assert train_char([TEXT]).json == CHAR.json


def test_long_texts_are_cut_without_changing_tokens(monkeypatch):
    text = "and more.\n\nWhat,\n\nthree\n four 'tis\r\n\r\nfive!\n\t six\nseven" * 50
    whole = BPE.encode(text.encode())
    monkeypatch.setattr("tgen.tokenizer.tokenizer._BLOCK", 7)
    assert len(list(split_blocks(text, LINE_STARTS))) > 50
    assert BPE.encode(text.encode()) == whole


@pytest.mark.parametrize("kind", ["a", "é", "字", "\n", " ", "-", "_", "=_", "\t\n"])
def test_training_splits_long_runs(kind):
    words = "word " * 10
    for n, n_pieces in [(1024, 1), (1025, 9), (5000, 40)]:
        text = words + "x1" + (kind * n)[:n] + "7" + words
        pieces = list(split_long_runs(text))
        assert "".join(pieces) == text
        assert len(pieces) == n_pieces
    text = (kind * 100_000).encode()
    trained = train_bpe([text], vocab_size=270)
    assert trained.vocab_size > 258
    assert trained.decode(trained.encode(text[:3000])) == text[:3000]
    assert len(trained.encode(text)) < len(text) / 50


def test_training_does_not_split_words(monkeypatch):
    text = ("word, 'tis\r\n\n" + "a" * 1024 + " " * 1024 + "-" * 1024 + "12345" * 1000) * 3
    assert list(split_long_runs(text)) == [text]
    trained = train_bpe([text.encode()], vocab_size=300)
    monkeypatch.setattr("tgen.tokenizer.train.split_long_runs", lambda text: [text])
    assert train_bpe([text.encode()], vocab_size=300).json == trained.json


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"decoder": null}', '{"decoder": {"type": "ByteLevel"}}', "\0"],
)
def test_text_that_is_not_a_byte_level_tokenizer_is_an_error(text):
    with pytest.raises(TokenizerError):
        Tokenizer(text)


def test_impossible_tokenizers_are_an_error():
    with pytest.raises(UsageError):
        make_tokenizer("char", [TEXT], vocab_size=200)
    with pytest.raises(UsageError):
        make_tokenizer("no/such/file", [TEXT])


def test_control_tokens_stay_text_after_an_encoding_failed(tokenizer):
    plain = tokenizer.encode(END_OF_TEXT.encode())
    assert tokenizer.end_of_text not in plain
    with suppress(TypeError):  # of newer versions of the library
        tokenizer.encode_with_special("\ud800")
    assert tokenizer.encode(END_OF_TEXT.encode()) == plain


def test_control_tokens_stay_text_beside_a_thread_that_encodes_them(tokenizer):
    plain, spans = tokenizer.encode(END_OF_TEXT.encode()), []
    text = f"The king {END_OF_TEXT}" * 100

    def encode_with_special() -> None:
        for _ in range(50):
            spans.append(tokenizer.encode_with_special(text))

    other = threading.Thread(target=encode_with_special)
    other.start()
    while other.is_alive():
        assert tokenizer.encode(END_OF_TEXT.encode()) == plain
    other.join()
    assert all(span == spans[0] for span in spans)
    assert [i for i, _, _ in spans[0]].count(tokenizer.end_of_text) == 100
