"""Vocabularies with holes: ids of the library for what they can express, never a silent drop."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.tokenizer_files import (
    LEGACY,
    added,
    byte_level,
    level,
    mixed,
    neox,
    openai_gpt,
    sentencepiece,
)
from support.vocabularies import SMOLLM2_MISSING, without_bytes
from tgen.errors import CorpusError, TokenizerError, UsageError
from tgen.tokenizer import TextStream, Tokenizer
from tgen.tokenizer.backend import Backend

FILE = without_bytes(byte_level(splitter=level()))
TOKENIZER = Tokenizer(json.dumps(FILE))
SOME_TEXT = st.one_of(st.text(), st.sampled_from(mixed(3000).split(" ")))


def library(file):
    backend = Backend.from_str(json.dumps(file))
    backend.encode_special_tokens = True
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def is_expressible(text):
    return not set(text.encode()) & set(SMOLLM2_MISSING)


@given(SOME_TEXT)
@settings(max_examples=80, deadline=None)
@example("!\x04!")
@example("\U00040000 \U000bffff \U000c0000")
def test_text_has_the_ids_of_the_library_or_is_an_error(text):
    if is_expressible(text):
        ids = TOKENIZER.encode(text.encode())
        assert ids == library(FILE)(text)
        assert TOKENIZER.decode(ids) == text.encode()
    else:
        with pytest.raises(UsageError, match="cannot express"):
            TOKENIZER.encode(text.encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"!\x04!", "byte 1 of the text is 0x04, which"),
        ("é\U00040000".encode(), "byte 2 of the text is 0xF1 (of the character U+40000), which"),
        (b"\xe6\x97\xff", "byte 2 of the text is 0xFF, which"),
        (b"ab\xf2\x80", "byte 2 of the text is 0xF2, which"),
        (b"x" * 70 + b"\x1d", "byte 70 of the text is 0x1D"),
    ],
)
def test_error_has_the_byte_and_its_position(data, message):
    for encode in (TOKENIZER.encode, TOKENIZER.encode_prompt):
        with pytest.raises(UsageError) as caught:
            encode(data)
        assert message in caught.value.message
        assert caught.value.hint


@given(st.lists(st.one_of(st.binary(max_size=4), SOME_TEXT.map(str.encode))).map(b"".join))
@settings(max_examples=50, deadline=None)
def test_corpus_has_the_replacement_character_instead_and_counts_it(data):
    text = data.decode(errors="surrogateescape")
    holes = [c for c in text if set(c.encode(errors="surrogateescape")) & set(SMOLLM2_MISSING)]
    expected = "".join("\ufffd" if c in holes else c for c in text)
    ids, n_replaced = TOKENIZER.encode_corpus(data)
    assert n_replaced == len(holes)
    assert TOKENIZER.decode(ids.tolist()) == expected.encode(errors="surrogateescape")
    assert TOKENIZER.make_expressible(data) == expected.encode(errors="surrogateescape")
    assert ids.tolist() == TOKENIZER.encode(TOKENIZER.make_expressible(data))


@given(SOME_TEXT)
@settings(max_examples=50, deadline=None)
def test_streamed_text_equals_decoded_text(text):
    ids, stream = TOKENIZER.encode_corpus(text.encode())[0].tolist(), TextStream()
    pieces = [stream.feed(TOKENIZER.token_bytes(i)) for i in ids]
    assert b"".join(pieces) + stream.flush() == TOKENIZER.decode(ids)


def test_bytes_of_invalid_utf8_keep_their_tokens_where_the_vocabulary_has_them():
    data = b"a\x80\xc3b\xf0\x9f"
    assert TOKENIZER.decode(TOKENIZER.encode(data)) == data
    assert TOKENIZER.encode_corpus(data)[1] == 0


def test_corpus_is_an_error_if_the_replacement_cannot_be_expressed_either():
    no_ef = Tokenizer(json.dumps(without_bytes(byte_level(splitter=level()), b"\x04\xef")))
    assert no_ef.encode_corpus(b"fine")[1] == 0
    with pytest.raises(CorpusError, match="neither 0x04 in the corpus nor U\\+FFFD"):
        no_ef.encode_corpus(b"a\x04")


def test_bytes_that_no_valid_text_has_matter_in_invalid_text_only():
    file = without_bytes(neox(), bytes([0xC0, 0xC1, *range(0xF5, 0x100)]))
    tokenizer, text = Tokenizer(json.dumps(file)), mixed(1 << 15) + "\n  e\u0301 \U00040000"
    assert tokenizer.encode(text.encode()) == library(file)(text)
    assert tokenizer.encode_corpus(b"a\xff\xc0b\x80")[1] == 2


def test_hole_is_found_after_normalization():
    # Without 0xC3, é has no token, but its decomposed form has one until NFC composes it.
    file = without_bytes(byte_level(splitter=level(), normalizer={"type": "NFC"}), b"\xc3")
    composed = Tokenizer(json.dumps(file))
    for text in ("aé", "ae\u0301"):
        with pytest.raises(UsageError, match="byte 1 of the text"):
            composed.encode(text.encode())
        assert composed.encode_corpus(text.encode())[1] == 1
    apart = Tokenizer(json.dumps(file | {"normalizer": {"type": "NFD"}}))
    assert apart.decode(apart.encode("aé".encode())) == "ae\u0301".encode()


def test_added_token_may_have_a_character_that_the_vocabulary_lacks():
    base = byte_level(splitter=level())
    n = len(base["model"]["vocab"])
    names = added(["<\x04>"], n + 3, special=False) + added(["<\x06>"], n + 4)
    file = without_bytes(base | {"added_tokens": [*base["added_tokens"], *names]})
    tokenizer = Tokenizer(json.dumps(file))
    assert tokenizer.decode(tokenizer.encode(b"a<\x04>b")) == b"a<\x04>b"
    for text in (b"<\x06>", b"<\x04", b"<\x04>\x04"):
        with pytest.raises(UsageError, match="cannot express"):
            tokenizer.encode(text)
    tokenizer.check_expressible("<\x06><\x04>", with_special=True)
    with pytest.raises(UsageError, match="byte 3 of the text is 0x06"):
        tokenizer.check_expressible("<\x06>\x06", with_special=True)


def test_sentencepiece_vocabulary_may_have_a_character_instead_of_its_byte():
    file = sentencepiece(normalizer=LEGACY)
    vocab = [t for t in file["model"]["vocab"] if t not in ("<0x09>", "<0xE6>", "<0x7E>", "~")]
    vocab += ["\t"]
    merges = [m for m in file["model"]["merges"] if {*m, "".join(m)} <= set(vocab)]
    model = file["model"] | {"vocab": {t: i for i, t in enumerate(vocab)}, "merges": merges}
    file["model"] = model
    tokenizer = Tokenizer(json.dumps(file))
    text = "a\tb  日" if "日" in vocab else "a\tb"
    assert tokenizer.encode(text.encode()) == library(file)(text)
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text.encode()
    with pytest.raises(UsageError, match=r"is 0xE6 \(of the character U\+62FF\)"):
        tokenizer.encode("x拿".encode())
    with pytest.raises(UsageError, match="byte 2 of the text is 0x7E"):
        tokenizer.encode(b"ab~")
    assert tokenizer.encode_corpus("x拿~y".encode())[1] == 2
    assert tokenizer.decode(tokenizer.encode(b"\x09\xff")) == b"\x09\xff"


@pytest.mark.parametrize("text", ["x😀", "中", "a\x04", "\ufffd", "\u200b"])
def test_openai_gpt_cannot_express_characters_that_it_lacks_or_removes(text):
    tokenizer = Tokenizer(json.dumps(openai_gpt()))
    with pytest.raises(UsageError, match="cannot express"):
        tokenizer.encode(text.encode())
    with pytest.raises(CorpusError):
        tokenizer.encode_corpus(text.encode())
    with pytest.raises(UsageError):
        tokenizer.encode(b"\xff")


def test_byte_token_may_be_a_special_token():
    file = byte_level(splitter=level())
    file["added_tokens"].append(added(["a"], file["model"]["vocab"]["a"])[0])
    tokenizer = Tokenizer(json.dumps(file))
    assert tokenizer.encode(b"a\xff") == [*library(file)("a"), tokenizer.encode(b"\xff")[0]]
    assert tokenizer.decode(tokenizer.encode(b"banana")) == b"banana"
    pieces = sentencepiece(normalizer=LEGACY)
    newline = pieces["model"]["vocab"]["<0x0A>"]
    pieces["added_tokens"].append(added(["<0x0A>"], newline)[0])
    tokenizer = Tokenizer(json.dumps(pieces))
    assert tokenizer.encode(b"a\nb") == library(pieces)("a\nb")
    assert tokenizer.decode(tokenizer.encode(b"a\nb")) == b"a\nb"


def test_token_past_the_rows_of_the_model_is_an_error():
    file = byte_level(splitter=level())
    n = len(file["model"]["vocab"])
    file["added_tokens"] += added(["<image>"], n + 3, special=False) + added(["<video>"], n + 4)
    tokenizer = Tokenizer(json.dumps(file), n_rows=n + 3)
    assert tokenizer.vocab_size == n + 3
    assert tokenizer.encode(b"<video>") == library(file)("<video>")
    for encode in (tokenizer.encode, tokenizer.encode_prompt, tokenizer.encode_corpus):
        with pytest.raises(UsageError, match=f"the token '<image>' with the id {n + 3:,}"):
            encode(b"an <image>")
    with pytest.raises(UsageError, match="'<video>'"):
        tokenizer.encode_with_special("a <video>")
    assert tokenizer.token_bytes(n + 3) == tokenizer.token_bytes(n + 9) == b""
    few = Tokenizer(json.dumps(file), n_rows=300)  # not even all merged tokens
    assert few.merge_pairs.shape == (300, 2)
    assert few.end_of_text is None
    with pytest.raises(UsageError, match="the model has only 300 tokens"):
        few.encode(mixed(3000).encode())


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_models_that_are_not_bpe_are_refused_by_name(kind):
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(json.dumps({"model": {"type": kind, "vocab": {}}}))
    assert f"'{kind}'" in caught.value.message
    assert kind in caught.value.hint
    assert "BPE" in caught.value.hint
