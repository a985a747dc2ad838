"""Tokenizers as GGUF fields: read back with the same ids, or an error that names the reason."""

import json

import pytest

from support import tokenizer_files
from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.errors import ModelError, TokenizerError
from tgen.tokenizer import Tokenizer, train_char

NFC = {"type": "NFC"}


def make_tokenizer(file, **other):
    """Return a file's tokenizer with changes; `added` changes its first added token."""
    file = json.loads(json.dumps(file))
    file["added_tokens"][0] |= other.pop("added", {})
    return Tokenizer(json.dumps(file | other))


def to_fields(tokenizer, **other):
    end = tokenizer.end_of_text or 0
    fields = gguf_tokenizer.to_fields(tokenizer, tokenizer.vocab_size, ends=[end])
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
        ({"model": "llama"}, "unsupported tokenizer type 'llama'"),
        ({"pre": "falcon"}, "unsupported pre-tokenizer 'falcon'"),
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
    text, ends = gguf_tokenizer.to_json(to_fields(tokenizer, add_bos_token=True, bos_token_id=0))
    again = gguf_tokenizer.to_fields(Tokenizer(text), 300, ends=ends)
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


@pytest.mark.parametrize("name", tokenizer_files.files())
def test_foreign_tokenizers_round_trip_or_are_an_error(name):
    tokenizer = Tokenizer(json.dumps(tokenizer_files.files()[name][0]))
    known = {"gpt2": "gpt-2", "llama3": "llama-bpe", "thinking": "qwen2"}
    known |= {same: same for same in ("qwen2", "smollm")}
    if name not in known:
        with pytest.raises(TokenizerError, match=r"GGUF has no name|sentencepiece tokenizer"):
            to_fields(tokenizer)
        return
    fields = to_fields(tokenizer)
    assert fields["tokenizer.ggml.pre"] == known[name]
    text, ends = gguf_tokenizer.to_json(fields)
    again, mixed = Tokenizer(text, end_ids=ends), tokenizer_files.mixed(100_000).encode()
    assert again.encode(mixed) == tokenizer.encode(mixed)
    assert again.encode_prompt(b"x") == tokenizer.encode_prompt(b"x")


FILES = tokenizer_files.files()
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
    ("qwen2", {"normalizer": None}, "qwen2 without NFC"),
    ("gpt2", {"normalizer": NFC}, "gpt-2 with NFC"),
    ("thinking", {"added": {"lstrip": True}}, "cannot store lstrip of the added token '<think>'"),
    ("thinking", {"added": {"rstrip": True}}, "cannot store rstrip"),
    ("thinking", {"added": {"single_word": True}}, "cannot store single_word"),
    ("thinking", {"added": {"normalized": True}}, "cannot store normalized"),
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


def test_char_tokenizer_with_nfc_is_an_error():
    with pytest.raises(TokenizerError, match="with NFC"):
        to_fields(make_tokenizer(json.loads(train_char([b"ab"]).json), normalizer=NFC))


EQUIVALENT = [
    ("qwen2", {"normalizer": tokenizer_files.sequence("normalizers", NFC)}),
    ("gpt2", {"decoder": tokenizer_files.sequence("decoders", tokenizer_files.level())}),
    ("gpt2", {"added": {"normalized": True}}),  # has no effect without NFC
    ("gpt2", {"post_processor": bos_template(("<s>", [N + 2]))}),  # only the id matters
]


@pytest.mark.parametrize(("name", "other"), EQUIVALENT)
def test_equivalent_tokenizers_round_trip(name, other):
    tokenizer = make_tokenizer(FILES[name][0], **other)
    again = Tokenizer(gguf_tokenizer.to_json(to_fields(tokenizer))[0])
    mixed = tokenizer_files.mixed(20_000).encode()
    assert again.encode_prompt(mixed) == tokenizer.encode_prompt(mixed)


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
