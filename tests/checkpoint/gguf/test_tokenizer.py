"""Tokenizers as GGUF fields: read back with the same ids, or an error that names the reason."""

import json

import pytest

from support import tokenizer_files
from tgen.checkpoint.gguf import pre_tokenizers
from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.errors import ModelError, TokenizerError, UsageError
from tgen.tokenizer import Tokenizer, train_char
from tgen.tokenizer.tokenizer_json import BYTE_CHARACTERS

NFC = {"type": "NFC"}


def make_tokenizer(file, **other):
    """Return a file's tokenizer with changes; `added` changes its first added token."""
    file = json.loads(json.dumps(file))
    file["added_tokens"][0] |= other.pop("added", {})
    return Tokenizer(json.dumps(file | other))


def to_fields(tokenizer, name="", **other):
    end, n = tokenizer.end_of_text or 0, tokenizer.vocab_size
    fields = gguf_tokenizer.to_fields(tokenizer, n, ends=[end], name=name)
    return fields | {f"tokenizer.ggml.{key}": value for key, value in other.items()}


def ids_of(fields):
    return {
        key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): i
        for key, i in fields.items()
        if key.endswith("_token_id")
    }


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": "t5"}, "unsupported tokenizer type 't5'"),
        ({"pre": "kimi-k2"}, "unsupported pre-tokenizer 'kimi-k2'"),
        ({"pre": None}, "unsupported pre-tokenizer None"),
        ({"pre": 3}, "unsupported pre-tokenizer 3"),
        ({"tokens": ["a", 1]}, "no list of tokens"),
        ({"merges": None}, "no list of merges"),
        ({"token_type": [1]}, "do not match"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "two tokens named 'a'"),
    ],
)
def test_unsupported_fields_are_an_error(other, reason, tokenizer):
    with pytest.raises(ModelError, match=reason):
        gguf_tokenizer.to_json(to_fields(tokenizer, **other))


def test_bos_token_is_written_and_read(tokenizer):
    content, ends = gguf_tokenizer.to_json(to_fields(tokenizer, add_bos_token=True, bos_token_id=0))
    again = gguf_tokenizer.to_fields(Tokenizer(content), 300, ends=ends)
    assert again["tokenizer.ggml.add_bos_token"]
    assert ids_of(again) == {"eos": 0, "bos": 0}
    assert not to_fields(tokenizer)["tokenizer.ggml.add_bos_token"]


def test_ignore_merges_is_written_and_read(tokenizer):
    tokenizer_json = json.loads(tokenizer.json)
    i = tokenizer_json["model"]["vocab"]["Ġzzz"] = len(tokenizer_json["model"]["vocab"])
    for ignore_merges, name in ((False, "smaug-bpe"), (True, "llama-bpe")):
        tokenizer_json["model"]["ignore_merges"] = ignore_merges
        expected = Tokenizer(json.dumps(tokenizer_json))
        assert (expected.encode(b"a zzz") == [expected.encode(b"a")[0], i]) is ignore_merges
        fields = to_fields(expected)
        assert fields["tokenizer.ggml.pre"] == name
        assert Tokenizer(gguf_tokenizer.to_json(fields)[0]).encode(b"a zzz") == expected.encode(
            b"a zzz"
        )


def test_unsupported_pre_tokenizers_are_an_error(tokenizer):
    def with_pre(part):
        return Tokenizer(json.dumps(json.loads(tokenizer.json) | part))

    split = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    for part in ({"pre_tokenizer": split}, {"normalizer": {"type": "NFC"}}):
        with pytest.raises(TokenizerError, match="GGUF has no"):
            gguf_tokenizer.to_fields(with_pre(part), 300, ends=[0])
    with pytest.raises(TokenizerError, match="no end-of-text token"):
        gguf_tokenizer.to_fields(tokenizer, 300, ends=[])


FILES = tokenizer_files.files()
NAMES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "thinking": "qwen2", "marks": "qwen35"}
NAMES |= {"o200k": "gpt-4o", "gpt4o": "gpt-4o", "neox": "olmo"}
NAMES |= {same: same for same in ("qwen2", "smollm", "tekken", "deepseek-v3", "falcon")}


@pytest.mark.parametrize("name", NAMES)
def test_foreign_tokenizers_are_written_and_read(name):
    tokenizer = Tokenizer(json.dumps(FILES[name][0]))
    fields = to_fields(tokenizer)
    assert fields["tokenizer.ggml.pre"] == NAMES[name]
    content, ends = gguf_tokenizer.to_json(fields)
    again, mixed = Tokenizer(content, end_ids=ends), tokenizer_files.mixed(100_000).encode()
    assert again.encode(mixed) == tokenizer.encode(mixed)
    assert again.encode_prompt(b"x") == tokenizer.encode_prompt(b"x")


@pytest.mark.parametrize("name", sorted(FILES.keys() - NAMES.keys()))
def test_other_tokenizers_are_an_error(name):
    """Also sentencepiece's with a null character, see test_sentencepiece."""
    with pytest.raises(TokenizerError, match=r"GGUF has no name|llama\.cpp cannot read"):
        to_fields(Tokenizer(json.dumps(FILES[name][0])))


N = len(FILES["gpt2"][0]["model"]["vocab"])


def bos_template(*pieces):
    """Return a post-processor that puts tokens, (name, ids) each, before a text."""
    actual = tokenizer_files.template("", 0)
    actual["single"] = [{"SpecialToken": {"id": name, "type_id": 0}} for name, _ in pieces]
    actual["single"].append({"Sequence": {"id": "A", "type_id": 0}})
    actual["special_tokens"] = {
        name: {"id": name, "ids": ids, "tokens": [name] * len(ids)} for name, ids in pieces
    }
    return actual


UNSUPPORTED = [
    ("smollm", {"normalizer": NFC}, "smollm with NFC"),
    ("gpt2", {"normalizer": {"type": "NFKC"}}, "gpt-2 with NFKC"),
    ("marks", {"normalizer": None}, "qwen35 without NFC"),
    ("thinking", {"added": {"lstrip": True}}, "cannot store lstrip of the added token '<think>'"),
    ("thinking", {"added": {"rstrip": True}}, "cannot store rstrip"),
    ("thinking", {"added": {"single_word": True}}, "cannot store single_word"),
    ("thinking", {"added": {"normalized": True}}, "cannot store normalized"),
    ("thinking", {"added": {"normalized": True, "content": "<a"}}, "cannot store normalized"),
    (
        "gpt2",
        {"post_processor": bos_template(("<s>", [N + 1]), ("</s>", [N + 2]))},
        "2 tokens before",
    ),
    ("gpt2", {"post_processor": bos_template(("<s>", [N + 1, N + 2]))}, "2 tokens before"),
]


@pytest.mark.parametrize(("name", "other", "reason"), UNSUPPORTED)
def test_features_without_a_gguf_field_are_an_error(name, other, reason):
    with pytest.raises(TokenizerError, match=reason):
        to_fields(make_tokenizer(FILES[name][0], **other))


def test_phi3_is_known_by_its_name():
    """llama.cpp drops the spaces after the added tokens of models with such a name."""
    file = json.loads(json.dumps(FILES["thinking"][0]))
    file["added_tokens"] = [token | {"rstrip": True} for token in file["added_tokens"]]
    strips = make_tokenizer(file)
    keeps = make_tokenizer(FILES["thinking"][0])
    for tokenizer, name in ((strips, "Phi-3-mini"), (keeps, "mini")):
        fields = to_fields(tokenizer, name=name) | {"general.name": name}
        again = Tokenizer(gguf_tokenizer.to_json(fields)[0])
        text = "<think>  a"
        assert again.encode_with_special(text) == tokenizer.encode_with_special(text)
    with pytest.raises(TokenizerError, match="cannot store rstrip"):
        to_fields(strips, name="mini")
    with pytest.raises(TokenizerError, match="drops the spaces after"):
        to_fields(keeps, name="my-phi3")
    assert gguf_tokenizer.name_to_write(keeps, "my-phi3") == ""
    assert gguf_tokenizer.name_to_write(strips, "my-phi3") == "my-phi3"
    assert gguf_tokenizer.name_to_write(keeps, "mini") == "mini"


def test_ends_that_llama_cpp_does_not_know_are_named(tokenizer):
    assert not gguf_tokenizer.describe_missing_ends(tokenizer, [0, 1, 2])
    difference = gguf_tokenizer.describe_missing_ends(tokenizer, [0, 1, 2, 50])
    assert difference.startswith(f"llama.cpp does not end a text after {tokenizer.id_to_token(50)}")


EQUIVALENT = [
    ("qwen2", {"normalizer": None}),
    ("gpt2", {"normalizer": NFC}),
    ("qwen2", {"normalizer": tokenizer_files.sequence("normalizers", NFC)}),
    ("gpt2", {"decoder": tokenizer_files.sequence("decoders", tokenizer_files.level())}),
    ("gpt2", {"added": {"normalized": True}}),  # has no effect without NFC
    ("gpt2", {"normalizer": NFC, "added": {"normalized": True, "content": "  "}}),
    ("gpt2", {"normalizer": NFC, "added": {"normalized": True, "content": "|||IP|||"}}),
    ("gpt2", {"post_processor": bos_template(("<s>", [N + 2]))}),  # only the id matters
]


@pytest.mark.parametrize(("name", "other"), EQUIVALENT)
def test_equivalent_tokenizers_round_trip(name, other):
    tokenizer = make_tokenizer(FILES[name][0], **other)
    again = Tokenizer(gguf_tokenizer.to_json(to_fields(tokenizer))[0])
    mixed = tokenizer_files.mixed(20_000).encode()
    assert again.encode_prompt(mixed) == tokenizer.encode_prompt(mixed)


@pytest.mark.parametrize("name", pre_tokenizers.PRE_TOKENIZERS)
def test_every_pre_tokenizer_is_written_and_read(name):
    pre_tokenizer = pre_tokenizers.PRE_TOKENIZERS[name]
    file = json.loads(json.dumps(FILES["llama3"][0]))
    file["pre_tokenizer"] = pre_tokenizers.pre_tokenizer_json(pre_tokenizer)
    file["normalizer"] = NFC if pre_tokenizer.nfc else None
    file["model"]["ignore_merges"] = pre_tokenizer.ignore_merges
    expected = Tokenizer(json.dumps(file))
    fields = to_fields(expected)
    assert fields["tokenizer.ggml.pre"] == ("llama-bpe" if name == "glm4" else name)
    actual = Tokenizer(gguf_tokenizer.to_json(fields)[0])
    assert (actual.spec.patterns, actual.spec.byte_patterns) == (
        expected.spec.patterns,
        expected.spec.byte_patterns,
    )
    mixed = tokenizer_files.mixed(20_000).encode()
    assert actual.encode(mixed) == expected.encode(mixed)
    aliases = [alias for alias, same in pre_tokenizers.ALIASES.items() if same == name]
    del fields["tokenizer.ggml.add_bos_token"]
    for alias in [name, *aliases]:
        read = Tokenizer(gguf_tokenizer.to_json(fields | {"tokenizer.ggml.pre": alias})[0])
        assert read.spec.patterns == expected.spec.patterns
        assert bool(read.bos_ids) is pre_tokenizer.add_bos


@pytest.mark.parametrize("name", ["o200k", "tekken", "gpt2", "qwen2"])
def test_patterns_that_llama_cpp_approximates_are_named(name):
    difference = gguf_tokenizer.describe_difference(make_tokenizer(FILES[name][0]))
    assert bool(difference) is (name in ("o200k", "tekken"))


def test_vocabulary_without_some_bytes_is_written_and_read():
    file = json.loads(json.dumps(FILES["smollm"][0]))
    vocab = file["model"]["vocab"]
    missing = [BYTE_CHARACTERS[byte] for byte in (0x04, 0xC0, 0xF5)]
    names = [name for name in vocab if not set(missing) & set(name)]
    file["model"]["vocab"] = {name: i for i, name in enumerate(names)}
    file["model"]["merges"] = [p for p in file["model"]["merges"] if "".join(p) in names]
    file["added_tokens"] = tokenizer_files.added(tokenizer_files.SPECIAL, len(names))
    expected = Tokenizer(json.dumps(file))
    actual = Tokenizer(gguf_tokenizer.to_json(to_fields(expected))[0])
    assert actual.vocab_size == expected.vocab_size
    assert actual.spec.vocab.keys() >= set(names)
    assert not set(missing) & actual.spec.vocab.keys()
    text = "What is naïve? 12345 \t".encode()
    assert actual.encode(text) == expected.encode(text)
    with pytest.raises(UsageError, match="byte 1 of the text is 0x04"):
        actual.encode(b"a\x04")


def test_default_of_add_bos_token_is_llama_cpps(tokenizer):
    for pre, expected in (("llama-bpe", [0]), ("llama3", [0]), ("smaug-bpe", []), ("gpt-2", [])):
        fields = to_fields(tokenizer, pre=pre, bos_token_id=0)
        del fields["tokenizer.ggml.add_bos_token"]
        assert Tokenizer(gguf_tokenizer.to_json(fields)[0]).encode_prompt(b"x")[:-1] == expected


def test_ids_out_of_range_are_ignored():
    bare = train_char([b"no merges"])
    n = bare.vocab_size
    actual = gguf_tokenizer.to_fields(bare, n, ends=[99_999, -1, 1], bos=-1, pad=n)
    assert ids_of(actual) == {"eos": 1}
    with pytest.raises(TokenizerError, match="no end-of-text token"):
        gguf_tokenizer.to_fields(bare, n, ends=[n])
