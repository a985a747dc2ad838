"""The allowlist: a hostile tokenizer.json is one error, before the library sees it."""

import copy
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tokenizer_files import (
    LEGACY,
    added,
    bos_processor,
    byte_level,
    falcon_splitter,
    gemma3,
    inverted,
    level,
    metaspace,
    mixed,
    openai_gpt,
    punctuation,
    sentencepiece,
    sequence,
    split,
)
from tgen.errors import CorpusError, TokenizerError
from tgen.tokenizer import Tokenizer, patterns, train_bpe
from tgen.tokenizer.backend import Backend

TRAINED = json.loads(train_bpe([mixed(5000).encode()], vocab_size=300).json)
LLAMA3 = byte_level(patterns.LLAMA3, post=bos_processor)
LLAMA2 = sentencepiece(normalizer=LEGACY)
FALCON = byte_level(patterns.LLAMA3, splitter=falcon_splitter())
BASES = {"trained": TRAINED, "llama2": LLAMA2, "llama3": LLAMA3, "falcon": FALCON}
BASES |= {"gemma3": gemma3(), "openai-gpt": openai_gpt()}
N = len(LLAMA3["model"]["vocab"])


def error_message(text: str) -> str:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(text)
    assert "\n" not in caught.value.message + caught.value.hint
    assert len(caught.value.message) < 400
    return caught.value.message


def changed(base, path, value):
    """The JSON of the file with one value changed or added; `path` is like a/b/0."""
    file = copy.deepcopy(base)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    inside = file
    for key in parents:
        inside = inside[key]
    inside[last] = value
    return json.dumps(file)


precompiled = {"type": "Precompiled", "precompiled_charsmap": "ALQCAACEAAAAAACA"}
bert_normalizer = {
    **dict.fromkeys(("clean_text", "handle_chinese_chars", "lowercase"), True),
    "type": "BertNormalizer",
    "strip_accents": None,
}
replace = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
UNSUPPORTED = [
    # Normalizers, pre-tokenizers, decoders and post-processors.
    ("(x+x+)+y", "pre_tokenizer/pretokenizers/0/pattern", {"Regex": "(x+x+)+y"}),
    ("String", "pre_tokenizer/pretokenizers/0/pattern", {"String": " "}),
    ("each digit", "pre_tokenizer/pretokenizers/0", split("each digit")),
    ("Removed", "pre_tokenizer/pretokenizers/0/behavior", "Removed"),
    ("invert", "pre_tokenizer/pretokenizers/0/invert", True),
    ("Removed", "pre_tokenizer/pretokenizers/0", inverted(patterns.DEEPSEEK_V3[2])),
    ("Whitespace", "pre_tokenizer/pretokenizers/0", {"type": "Whitespace"}),
    ("Punctuation", "pre_tokenizer/pretokenizers/0", punctuation("Isolated")),
    ("BertPreTokenizer", "pre_tokenizer/pretokenizers/0", {"type": "BertPreTokenizer"}),
    ("Sequence", "pre_tokenizer/pretokenizers/0", sequence("pretokenizers", level())),
    ("41 components", "pre_tokenizer/pretokenizers", [split(patterns.LLAMA3)] * 40 + [level()]),
    ("ByteLevel before another", "pre_tokenizer/pretokenizers", [level(), split(patterns.LLAMA3)]),
    ("add_prefix_space", "pre_tokenizer/pretokenizers/1/add_prefix_space", True),
    ("without add_prefix_space", "pre_tokenizer", {"type": "ByteLevel", "use_regex": True}),
    ("Precompiled", "normalizer", precompiled),
    ("Precompiled", "normalizer", sequence("normalizers", precompiled)),
    ("Nmt", "normalizer", {"type": "Nmt"}),
    ("BertNormalizer with ByteLevel", "normalizer", bert_normalizer),
    ("Replace with ByteLevel", "normalizer", replace),
    ("9 components", "normalizer", sequence("normalizers", *[{"type": "NFC"}] * 9)),
    ("Prepend", "normalizer", {"type": "Prepend", "prepend": "x" * 1000}),
    ("None", "decoder", None),
    ("WordPiece", "decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}),
    ("Fuse", "decoder", sequence("decoders", level(), {"type": "Fuse"})),
    ("RobertaProcessing", "post_processor", {"type": "RobertaProcessing"}),
    ("4294967295", "post_processor/processors/1/special_tokens/<s>/ids", [2**32 - 1]),
    ("SpecialToken", "post_processor/processors/1/single/0", {"SpecialToken": {"id": "<z>"}}),
    ("SpecialToken", "post_processor/processors/1/special_tokens", {}),
    ("without the text", "post_processor/processors/1/single", []),
    ("template", "post_processor/processors/1/single", [7]),
    ("two templates", "post_processor/processors/0", bos_processor(N)["processors"][1]),
    # The vocabulary and its merges.
    ("'Unigram'", "model", {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}),
    ("'WordLevel'", "model/type", "WordLevel"),
    ("0.1", "model/dropout", 0.1),
    ("continuing_subword_prefix", "model/continuing_subword_prefix", "##longer than all"),
    ("end_of_word_suffix", "model/end_of_word_suffix", "</w>"),
    ("byte_fallback 1", "model/byte_fallback", 1),
    ("'cache'", "model/cache", 2**63),
    ("4294967295", "model/vocab/a", 2**32 - 1),
    ("-1", "model/vocab/a", -1),
    ("True", "model/vocab/a", True),
    ("1.0", "model/vocab/a", 1.0),
    ("with the id 5", "model/vocab/a", 5),
    ("empty token", "model/vocab/", N),
    ("no tokens", "model/vocab", {}),
    ("vocab []", "model/vocab", []),
    ("byte tokens", "model/vocab", {"日": 0}),
    ("out of vocabulary", "model/merges/0", ["a", "nothing"]),
    ("out of vocabulary", "model/merges/0", ["Ġthe", "Ġthe"]),
    ("out of vocabulary", "model/merges/0", ["a", "longer than all tokens"]),
    ("not pairs", "model/merges/0", ["a"]),
    ("not pairs", "model/merges/0", "a b c"),
    ("not pairs", "model/merges/0", [1, 2]),
    ("not pairs", "model/merges/0", {"a": 1, "b": 2}),
    ("not pairs", "model/merges/0", 7),
    # Added tokens.
    ("0 bytes", "added_tokens/0/content", ""),
    ("513 bytes", "added_tokens/0/content", "x" * 513),
    ("twice", "added_tokens/0/content", "<s>"),
    ("twice", "added_tokens/0/id", N + 1),
    (str(2**32), "added_tokens/0/id", 2**32),
    ("special 1", "added_tokens/0/special", 1),
    ("surrogates", "added_tokens/0/content", "\ud800"),
    (f"two tokens with the id {N}", "model/vocab/a hole before it", N),
    (f"has id {N + 1} (expected {N})", "added_tokens", added(["<next>", "<s>"], N + 1)),
    ("as an added token", "added_tokens/0", None),
    ("10,001", "added_tokens", added([f"<{n}>" for n in range(10_001)], N)),
    ("added tokens", "added_tokens", {"a": 1}),
    # The rest.
    ("version", "version", "2.0"),
    ("'extra'", "extra", 1),
]


@pytest.mark.parametrize(("expected", "path", "value"), UNSUPPORTED, ids=lambda v: str(v)[:30])
def test_unsupported_content_is_an_error_that_names_it(expected, path, value):
    assert expected in error_message(changed(LLAMA3, path, value))


@pytest.mark.parametrize(
    ("expected", "path", "value"),
    [
        ("byte tokens", "model/vocab", {"a": 0}),
        ("byte_fallback", "model/byte_fallback", False),
        ("Prepend of 'x'", "normalizer/normalizers/0/prepend", "x"),
        ("Replace", "normalizer/normalizers/1/content", "▁" * 1000),
        ("Regex", "normalizer/normalizers/1/pattern", {"Regex": " +"}),
        ("nothing to replace", "normalizer", None),
        ("Metaspace", "pre_tokenizer", metaspace("first")),
        ("the decoder Fuse", "decoder", {"type": "Fuse"}),
        ("Strip of 'x'", "decoder/decoders/3/content", "x"),
        ("Strip", "decoder/decoders/3/stop", 2**63),
        ("Strip", "decoder/decoders/3/start", -1),
        ("Strip", "decoder/decoders/3/start", 2**64),
        ("Metaspace with 'xy'", "decoder/decoders/0", metaspace("first") | {"replacement": "xy"}),
        ("Metaspace", "decoder/decoders/0", metaspace("sometimes")),
        ("ByteLevel", "decoder/decoders/1", level()),
    ],
    ids=lambda v: str(v)[:30],
)
def test_unsupported_sentencepiece_content_is_an_error_that_names_it(expected, path, value):
    assert expected in error_message(changed(LLAMA2, path, value))


@pytest.mark.parametrize("scheme", ["sometimes", "first"])
def test_contradictory_metaspace_is_an_error(scheme):
    file = sentencepiece(splitter=metaspace(scheme) | {"add_prefix_space": False})
    assert scheme in error_message(json.dumps(file))


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("duplicate key 'model'", '{"model": {}, "model": {}}'),
        ("duplicate key 'a'", '{"model": {"vocab": {"a": 0, "a": 1}}}'),
        ("NaN", '{"model": NaN}'),
        ("Infinity", '{"model": -Infinity}'),
        ("recursion", "[" * 100_000),
        ("None", '{"a": ' * 900 + "1" + "}" * 900),
        ("not a JSON object", "[]"),
        ("digits", '{"a": ' + "9" * 5000 + "}"),
        ("cannot read", "\ufeff{}"),
    ],
)
def test_ambiguous_json_is_an_error(expected, text):
    assert expected in error_message(text)


def test_truncation_and_padding_are_ignored():
    file = LLAMA3 | {
        "truncation": {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 9,
        },
        "padding": {"strategy": {"Fixed": 2 * 10**8}, "direction": "Left", "pad_id": 0},
    }
    assert Tokenizer(json.dumps(file)).encode(b"one two three") == Tokenizer(
        json.dumps(LLAMA3)
    ).encode(b"one two three")


def test_old_notations_are_read():
    older = copy.deepcopy(LLAMA3)
    older["model"]["merges"] = ["#version: 0.2", *map(" ".join, older["model"]["merges"])]
    del older["model"]["type"], older["version"]
    newer, text = Tokenizer(json.dumps(LLAMA3)), mixed(5000).encode()
    assert Tokenizer(json.dumps(older)).encode(text) == newer.encode(text)
    never = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": False}
    assert Tokenizer(json.dumps(sentencepiece(splitter=never))).encode(b"") == []


def paths(value, path=()):
    """The path of every value inside a JSON value; the first 12 of long lists and objects."""
    yield path
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in list(inside)[:12]:
            yield from paths(part, (*path, key))


def mutate(file, rng):
    """Replace, remove, move or insert one value."""
    *parents, last = rng.choice([path for path in paths(file) if path])
    inside = file
    for key in parents:
        inside = inside[key]
    odd = ["", "a", "▁", " ", "\0", -1, 0, 1, 2, 255, 2**31, 2**32 - 1, 2**63, 0.5, 1e308]
    odd += [None, True, False, [], {}, [[]], ["a", "b"], {"type": "NFC"}, {"String": ""}, level()]
    what = rng.random()
    if what < 0.25:
        del inside[last]
    elif what < 0.6:
        inside[last] = copy.deepcopy(rng.choice(odd))
    elif what < 0.8:
        other = file
        for key in rng.choice(list(paths(file))[1:]):
            other = other[key]
        inside[last] = copy.deepcopy(other)
    elif isinstance(inside, dict):
        inside[str(rng.choice(odd))] = copy.deepcopy(rng.choice(odd))
    else:
        inside.insert(0, copy.deepcopy(rng.choice([*odd, *inside])))


@given(st.integers(0, 2**32), st.sampled_from(sorted(BASES)))
@settings(max_examples=100, deadline=None)
def test_mutated_file_is_an_error_or_encodes_as_in_the_library(seed, base):
    rng, file = random.Random(seed), copy.deepcopy(BASES[base])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        mutate(file, rng)
    text = json.dumps(file)
    try:
        ours = Tokenizer(text)
    except TokenizerError:
        return
    # tgen ignores these.
    file |= {"truncation": None, "padding": None, "post_processor": None}
    library = Backend.from_str(json.dumps(file))
    library.encode_special_tokens = True
    try:
        sample = ours.make_expressible(mixed(300, seed=rng.randrange(50)).encode())
    except CorpusError:  # neither a character nor U+FFFD has tokens
        return
    assert ours.encode(sample) == library.encode(sample.decode(), add_special_tokens=False).ids
