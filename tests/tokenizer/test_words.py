"""Word tokenizers: one token per word, lossless, and unknown words named or encoded as <unk>."""

import json

import pytest

from tgen.errors import TokenizerError, UsageError
from tgen.tokenizer import Tokenizer, train_words

TEXT = "What is  StatQuest? It's\n\t awesome ,  isn't it? \r\nÜber 3.5 e\u0301 日本語 "


def words_of(text, **options):
    return train_words([(text.encode(), True)], **options)


@pytest.mark.parametrize("text", [TEXT, "", " ", "\n", " what", "what ", "a  b", "it's, it's."])
def test_encoding_and_decoding_is_exact_with_all_white_space(text):
    tokenizer = words_of(TEXT + text)
    tokenizer = train_words([(TEXT.encode(), True), (text.encode(), True), (text.encode(), False)])
    for continuation in (False, True):
        ids = tokenizer.encode(text.encode(), continuation=continuation)
        assert tokenizer.decode(ids, continuation=continuation) == text.encode()


def test_a_word_is_the_same_token_at_the_start_and_inside_of_a_text(tmp_path):
    tokenizer = words_of("what is statquest")
    assert tokenizer.encode(b"statquest is what") == tokenizer.encode(b"what is statquest")[::-1]
    assert tokenizer.vocab_size == 5  # three words, end of text, padding
    (tmp_path / "tokenizer.json").write_text(tokenizer.json)
    transformers = pytest.importorskip("transformers")
    other = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = other.encode("statquest is what")
    assert ids == tokenizer.encode(b"statquest is what")
    assert other.decode(ids) == "statquest is what"
    assert Tokenizer(tokenizer.json).encode(b"statquest is") == ids[:2]


def test_an_unknown_word_is_named_or_encoded_as_unk_if_asked():
    tokenizer = words_of("what is statquest")
    for encode in (tokenizer.encode, tokenizer.encode_corpus):
        with pytest.raises(UsageError, match="the word 'new' is not in the vocabulary"):
            encode(b"what is new")
    with pytest.raises(UsageError, match="the word 'new'"):
        tokenizer.encode_with_special("what is new<|endoftext|>")
    assert tokenizer.make_expressible(b"what new is") == b"what is"
    unknown = words_of("what is statquest what", unknown=True, vocab_size=4)
    assert [unknown.id_to_token(i) for i in unknown.encode(b"what is new")] == [
        "\u2581what",
        "<unk>",
        "<unk>",
    ]
    with pytest.raises(UsageError, match="vocab_size: too small"):
        words_of("what is statquest", vocab_size=4)
    for text, named in ((b"a \xff", "not UTF-8"), ("a\u2581".encode(), r"U\+2581")):
        with pytest.raises(UsageError, match=named):
            words_of("a", unknown=True).encode(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "? what",
            r"the word '\?' after a space or at the start of a text is not in the vocabulary",
        ),
        ("is ?", r"the word '\?' after a space or at the start of a text is not in the vocabulary"),
        ("is?what", "the word 'what' without a space before it is not in the vocabulary"),
        ("is new", "the word 'new' is not in the vocabulary"),
    ],
)
def test_the_error_of_a_known_word_with_or_without_a_space_says_so(text, words):
    with pytest.raises(UsageError, match=words):
        words_of("what is?").encode(text.encode())


def test_word_level_files_of_others_are_refused_by_what_differs():
    file = json.loads(words_of("a b").json)
    file["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(TokenizerError, match="'WordLevel' with another pre_tokenizer"):
        Tokenizer(json.dumps(file))
