"""Tokenizers in GGUF's fields: they come back with the same ids, or are refused by name."""

import json

import pytest

from support import tokenizer_files
from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.errors import ModelError, TokenizerError
from tgen.tokenizer import Tokenizer, train_char

NFC = {"type": "NFC"}


def made(file, **other):
    """A file's tokenizer with other parts; `added` are settings of its first added token."""
    file = json.loads(json.dumps(file))
    file["added_tokens"][0] |= other.pop("added", {})
    return Tokenizer(json.dumps(file | other))


def fields_of(tokenizer, **other):
    end = tokenizer.end_of_text or 0
    vocabulary = gguf_tokenizer.to_fields(tokenizer, tokenizer.vocab_size, ends=[end])
    fields = {
        "model": vocabulary.model,
        "pre": vocabulary.pre,
        "tokens": vocabulary.tokens,
        "token_type": vocabulary.types,
        "merges": vocabulary.merges,
        "add_bos_token": vocabulary.add_bos,
        **{f"{name}_token_id": i for name, i in vocabulary.ids.items()},
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | other).items()}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": "llama"}, "of kind 'llama'"),
        ({"pre": "falcon"}, "cuts words by 'falcon'"),
        ({"pre": 3}, "cuts words by 3"),
        ({"tokens": ["a", 1]}, "no list of tokens"),
        ({"merges": None}, "no list of merges"),
        ({"token_type": [1]}, "do not fit"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "two tokens named 'a'"),
    ],
)
def test_other_tokenizers_are_refused_by_name(other, reason, tokenizer):
    with pytest.raises(ModelError, match=reason):
        gguf_tokenizer.to_json(fields_of(tokenizer, **other))


def test_a_token_before_every_text_goes_both_ways(tokenizer):
    text, ends = gguf_tokenizer.to_json(fields_of(tokenizer, add_bos_token=True, bos_token_id=0))
    again = gguf_tokenizer.to_fields(Tokenizer(text), 300, ends=ends)
    assert again.add_bos
    assert again.ids == {"eos": 0, "bos": 0}
    assert not gguf_tokenizer.to_fields(tokenizer, 300, ends=[0]).add_bos


def test_a_word_that_no_merge_makes_is_looked_up_whole_where_its_name_says_so(tokenizer):
    described = json.loads(tokenizer.json)
    i = described["model"]["vocab"]["Ġzzz"] = len(described["model"]["vocab"])
    for whole_words, name in ((False, "smaug-bpe"), (True, "llama-bpe")):
        described["model"]["ignore_merges"] = whole_words
        wanted = Tokenizer(json.dumps(described))
        assert (wanted.encode(b"a zzz") == [wanted.encode(b"a")[0], i]) is whole_words
        fields = fields_of(wanted)
        assert fields["tokenizer.ggml.pre"] == name
        assert Tokenizer(gguf_tokenizer.to_json(fields)[0]).encode(b"a zzz") == wanted.encode(
            b"a zzz"
        )


def test_tokenizers_that_llama_cpp_would_not_follow_are_refused(tokenizer):
    def with_pre(part):
        return Tokenizer(json.dumps(json.loads(tokenizer.json) | part))

    split = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    for part in ({"pre_tokenizer": split}, {"normalizer": {"type": "NFC"}}):
        with pytest.raises(TokenizerError, match="GGUF has no"):
            gguf_tokenizer.to_fields(with_pre(part), 300, ends=[0])
    with pytest.raises(TokenizerError, match="no token that ends"):
        gguf_tokenizer.to_fields(tokenizer, 300, ends=[])


@pytest.mark.parametrize("name", tokenizer_files.files())
def test_tokenizers_from_elsewhere_come_back_or_are_refused(name):
    tokenizer = Tokenizer(json.dumps(tokenizer_files.files()[name][0]))
    known = {"gpt2": "gpt-2", "llama3": "llama-bpe", "thinking": "qwen2"}
    known |= {same: same for same in ("qwen2", "smollm")}
    if name not in known:
        with pytest.raises(TokenizerError, match=r"GGUF has no name|sentencepiece's kind"):
            fields_of(tokenizer)
        return
    fields = fields_of(tokenizer)
    assert fields["tokenizer.ggml.pre"] == known[name]
    text, ends = gguf_tokenizer.to_json(fields)
    again, mixed = Tokenizer(text, ends=ends), tokenizer_files.mixed(100_000).encode()
    assert again.encode(mixed) == tokenizer.encode(mixed)
    assert again.encode_prompt(b"x") == tokenizer.encode_prompt(b"x")


FILES = tokenizer_files.files()
N = len(FILES["gpt2"][0]["model"]["vocab"])


def begins(*pieces):
    """A post-processor that puts tokens before a text: each a name and its ids."""
    found = tokenizer_files.template("", 0)
    found["single"] = [{"SpecialToken": {"id": name, "type_id": 0}} for name, _ in pieces]
    found["single"].append({"Sequence": {"id": "A", "type_id": 0}})
    found["special_tokens"] = {
        name: {"id": name, "ids": ids, "tokens": [name] * len(ids)} for name, ids in pieces
    }
    return found


LOST = [
    ("qwen2", {"normalizer": None}, "qwen2 without NFC"),
    ("gpt2", {"normalizer": NFC}, "gpt-2 with NFC"),
    ("thinking", {"added": {"lstrip": True}}, "place for lstrip of the added token '<think>'"),
    ("thinking", {"added": {"rstrip": True}}, "place for rstrip"),
    ("thinking", {"added": {"single_word": True}}, "place for single_word"),
    ("thinking", {"added": {"normalized": True}}, "place for normalized"),
    ("gpt2", {"post_processor": begins(("<s>", [N + 1]), ("</s>", [N + 2]))}, "puts 2 tokens"),
    ("gpt2", {"post_processor": begins(("<s>", [N + 1, N + 2]))}, "puts 2 tokens"),
]


@pytest.mark.parametrize(("name", "other", "reason"), LOST)
def test_what_would_be_lost_on_the_way_is_refused(name, other, reason):
    with pytest.raises(TokenizerError, match=reason):
        fields_of(made(FILES[name][0], **other))


def test_characters_with_nfc_are_refused():
    with pytest.raises(TokenizerError, match="with NFC"):
        fields_of(made(json.loads(train_char([b"ab"]).json), normalizer=NFC))


KEPT = [
    ("qwen2", {"normalizer": tokenizer_files.sequence("normalizers", NFC)}),
    ("gpt2", {"decoder": tokenizer_files.sequence("decoders", tokenizer_files.level())}),
    ("gpt2", {"added": {"normalized": True}}),  # without NFC there is nothing to look behind
    ("gpt2", {"post_processor": begins(("<s>", [N + 2]))}),  # the id counts, not the name
]


@pytest.mark.parametrize(("name", "other"), KEPT)
def test_what_says_the_same_in_other_words_comes_back(name, other):
    tokenizer = made(FILES[name][0], **other)
    again = Tokenizer(gguf_tokenizer.to_json(fields_of(tokenizer))[0])
    mixed = tokenizer_files.mixed(20_000).encode()
    assert again.encode_prompt(mixed) == tokenizer.encode_prompt(mixed)


def test_a_file_that_does_not_say_begins_as_llama_cpp_does(tokenizer):
    for pre, begins_so in (("llama-bpe", [0]), ("llama3", [0]), ("smaug-bpe", []), ("gpt-2", [])):
        fields = fields_of(tokenizer, pre=pre, bos_token_id=0)
        del fields["tokenizer.ggml.add_bos_token"]
        assert Tokenizer(gguf_tokenizer.to_json(fields)[0]).encode_prompt(b"x")[:-1] == begins_so


def test_ids_out_of_range_are_no_tokens():
    bare = train_char([b"no merges"])
    n = bare.vocab_size
    found = gguf_tokenizer.to_fields(bare, n, ends=[99_999, -1, 1], bos=-1, pad=n)
    assert found.ids == {"eos": 1}
    with pytest.raises(TokenizerError, match="no token that ends"):
        gguf_tokenizer.to_fields(bare, n, ends=[n])
