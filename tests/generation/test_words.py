"""A text spells only known words, whatever its tokens are."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models import TEXT
from tgen.config import SamplingConfig
from tgen.errors import UsageError
from tgen.generation.vocabulary import Vocabulary
from tgen.generation.words import (
    KnownWords,
    WordTokens,
    find_borders,
    is_word_character,
    last_word,
    split_words,
)
from tgen.loaded_model import Decoding, open_model
from tgen.python_api import load
from tgen.tokenizer import train_char, train_words

PIECES = ["a", "b", "é", "e\u0301", "'", "ab", "日", "한", " ", ", ", "×", "\n", "b a", "—", "🦋"]
ALL_BYTES = sorted({bytes([b]) for piece in PIECES for b in piece.encode()})
WORDS = ["a", "ab", "abb", "é", "bé한", "b'a", "e\u0301a"]


def allowed(known, text, size, ends=()):
    logits = np.zeros(size, np.float32)
    known.apply(logits, text, list(ends))
    return np.flatnonzero(logits == 0).tolist()


@cache
def starts_of_separators():
    """The first bytes of all characters outside words."""
    characters = map(chr, (*range(0xD800), *range(0xE000, 0x110000)))
    separators = (one.encode() for one in characters if not is_word_character(one))
    return {one[:n] for one in separators for n in range(1, 4)}


def is_possible(text, words):
    """Whether more characters can turn a text into some of these words alone."""
    try:
        characters, rest = text.decode(), b""
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return False
        characters, rest = text[: error.start].decode(), text[error.start :]
    spaced = "".join(one if is_word_character(one) else " " for one in characters)
    *whole, last = spaced.split(" ")
    if not {*filter(None, whole)} <= {*words}:
        return False
    if rest and rest in starts_of_separators() and last in (*words, ""):
        return True
    return any(word.encode().startswith(last.encode() + rest) for word in words)


@given(
    prompt=st.lists(st.sampled_from(PIECES), max_size=4).map("".join),
    cut=st.integers(0, 3),
    tokens=st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3), max_size=8),
    parts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=8, max_size=8),
)
def test_tokens_are_allowed_if_and_only_if_words_can_follow(prompt, cut, tokens, parts):
    text = prompt.encode()
    text = text[: len(text) - cut]
    pool = [*ALL_BYTES]
    for token, (start, end) in zip(tokens, parts, strict=False):
        data = "".join(token).encode()
        pool.append(data[start : len(data) - end] or data)
    if not is_possible(text, WORDS):
        text = b""
    known = KnownWords([word.encode() for word in WORDS], WordTokens.of(pool))
    found = allowed(known, text, len(pool))
    assert found == [i for i, token in enumerate(pool) if is_possible(text + token, WORDS)]


def test_words_are_runs_of_letters_digits_marks_and_apostrophes():
    text = "It's 'Tis o’er; e\u0301té_x 3rd\u00a0well-known 한국 का 日本ab日".encode() + b"\xffz"
    found = {word.decode() for word in split_words(text)}
    wanted = "It's 'Tis o’er e\u0301té x 3rd well known 한국 का ab z"
    assert found == {*wanted.split()}
    assert not is_word_character("_")
    assert last_word(b"the ki") == b"ki"
    assert last_word("the nä".encode()[:-1]) == b"n\xc3"
    assert last_word(b"the ") == b""
    assert last_word(b"\xff" + b"k" * 300) == b"k" * 204


def test_borders_of_a_string():
    assert [*find_borders("王".encode(), "国王说".encode(), 0)] == [True]  # no spaces there
    assert [*find_borders(b"king", b"kings, king, unking", 0)] == [True]
    assert [*find_borders(b"king", b"the king", 0)] == [False]
    assert [*find_borders(b"king", b"the king", 5)] == []
    assert [*find_borders(b", k", b"a, k, ki", 0)] == [True]
    assert [*find_borders(b"king\n", b"king\nthe", 0)] == [True]
    assert [*find_borders(b"king", "éking kingé".encode(), 0)] == []
    assert [*find_borders(b"king", b"king\xc3", 0)] == []


def test_end_tokens_follow_whole_words_and_words_of_a_prompt_are_completed():
    tokens = [b"", b"the", b"n", b" ", b"x", b"e th", b"e, q"]
    known = KnownWords([b"the", b"then"], WordTokens.of(tokens))
    assert allowed(known, b"", 8, [0]) == [0, 1, 3, 7]  # id 7 has no bytes at all
    assert allowed(known, b"the", 7, [0]) == [0, 2, 3]
    assert allowed(known, b"th", 7, [0]) == [5]
    assert allowed(known, b"a th", 7, [0]) == [5]
    assert allowed(known, b"xy", 7, [0]) == [0, 1, 2, 3, 4, 5]  # an unknown word of the prompt
    assert allowed(known, b"xy ", 7, [0]) == [0, 1, 3]


def test_tokens_that_lead_to_no_known_word_are_forbidden():
    """Without the byte e, `the` could never become `thee`."""
    tokens = [b"the", b"th", b"ee", b" "]
    known = KnownWords([b"thee", b"th"], WordTokens.of(tokens))
    assert allowed(known, b"", 4) == [1, 3]
    assert allowed(known, b"th", 4) == [2, 3]
    for words in ([b"thx"], []):
        with pytest.raises(UsageError, match="words: the tokenizer can spell no word"):
            KnownWords(words, WordTokens.of(tokens))


def test_more_words_than_tokens():
    tokens = [b"a", b"b", b"c", b" ", b"ca", b"a c", b"ad", b"d a"]
    words = [bytes(word) for word in product(b"abc", repeat=3)]
    known = KnownWords(words, WordTokens.of(tokens))
    assert allowed(known, b"", 8) == [0, 1, 2, 3, 4]
    assert allowed(known, b"ab", 8) == [0, 1, 2, 5]
    assert allowed(known, b"abc", 8) == [3]


def test_required_words_are_known_and_banned_ones_are_not():
    tokens = [bytes([i]) for i in range(128)]
    vocabulary = Vocabulary(tokens)
    sampling = SamplingConfig(words="the then hen", require=["queen"], ban=["hen"])
    known = vocabulary.known_words(sampling)
    assert {chr(i) for i in allowed(known, b"", 128)} & {*"theqn"} == {*"tq"}
    assert chr(ord("n")) not in map(chr, allowed(known, b"the", 128))
    assert vocabulary.known_words(sampling) is known
    assert vocabulary.known_words(SamplingConfig()) is None


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"top_p": 0.9, "top_k": 0, "min_p": 0.01},
        {"typical_p": 0.5, "xtc_probability": 0.5, "top_n_sigma": 2.0},
        {"repetition_penalty": 1.5, "dry_multiplier": 1.0, "no_repeat_ngram": 3},
        {"ban": ["a"], "bias": {"the": 3.0}, "logit_bias": {5: 4.0}},
        {"stop": ["king"], "min_tokens": 5},
        {"require": ["crown", "zebra"]},
    ],
)
def test_texts_have_known_words_only(trained, more):
    model = load(trained)
    for seed in range(4):
        for prompt in ("The ki", "What is", "zzz"):
            text = model.generate(
                prompt, words=TEXT, temperature=2.0, max_new_tokens=40, seed=seed, **more
            )
            whole = (prompt + text.removesuffix("\ufffd")).encode()  # cut inside a character
            last = last_word(whole)
            known = split_words(TEXT) | {b"zebra"}
            unknown = split_words(whole[: len(whole) - len(last)]) - known
            assert all(prompt == "zzz" and word.startswith(b"zzz") for word in unknown)
            assert any(word.startswith(last) for word in known) or last.startswith(b"zzz")
            if "ban" in more:
                assert "a" not in text
            if "require" in more:
                assert {b"crown", b"zebra"} <= split_words(whole)


@pytest.mark.parametrize(
    "tokenizer", [train_char([TEXT]), train_words([(TEXT, True)])], ids=["char", "word"]
)
def test_words_with_tokens_of_characters_and_words(tokenizer):
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    words = b"The king said what na\xc3\xafve"
    known = KnownWords(split_words(words), WordTokens.of(tokens))
    random, text = np.random.default_rng(0), b""
    for _ in range(300):
        text += tokens[random.choice(allowed(known, text, len(tokens)))]
    last = last_word(text)
    assert split_words(text[: len(text) - len(last)]) <= split_words(words)
    assert len(split_words(text)) >= 3


def test_words_without_cache_and_in_batches(trained):
    model = load(trained)
    options = {"words": "what is the king crown", "temperature": 1.5, "max_new_tokens": 30}
    texts = model.generate_batch(["What", "The k"], seed=3, **options)
    assert texts[0] == model.generate("What", seed=3, **options)
    loaded = open_model(trained)
    sampling = loaded.sampling({**options, "seed": 3})
    for decoding in (Decoding(draft="off"), Decoding(kv_cache=False)):
        tokens = loaded.tokens([loaded.encode("What")], sampling=sampling, decoding=decoding)
        assert [token.id for token in tokens] == texts[0].tokens


@pytest.mark.parametrize(
    "constraint",
    [{"choices": ["a"]}, {"regex": "a"}, {"json_schema": {}}, {"grammar": 'start: "a"'}],
)
def test_words_cannot_be_combined_with_a_constraint(constraint):
    with pytest.raises(UsageError, match="words cannot be combined with"):
        SamplingConfig(words="a", **constraint)


@pytest.mark.parametrize("value", [5, "", ["a"]])
def test_words_are_a_text(value):
    with pytest.raises(UsageError, match="words: invalid value"):
        SamplingConfig(words=value)
