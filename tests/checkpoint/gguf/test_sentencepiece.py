"""Sentencepiece vocabularies as GGUF fields: merges from scores, and back."""

import json

import pytest

from support import tokenizer_files
from support.gguf_vocabularies import KINDS, make_file, with_all_splits
from support.tokenizer_files import LEGACY, metaspace, sentencepiece
from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.checkpoint.gguf import tokenizer as merges
from tgen.errors import ModelError, TokenizerError
from tgen.tokenizer import Tokenizer

SPECIAL = {"<unk>", "<s>", "</s>"}
TEXTS = [
    b"",
    b" ",
    b"  two   three    four     five",
    "Äpfel, 日本語 🦋 \t\r\n\n x=1; ▁ <0x41> <s> </s> \x00".encode(),
    b"\xff\xfe not \xc3 UTF-8",
    tokenizer_files.mixed(100_000).encode(),
]


def make_tokenizer(file=None):
    return Tokenizer(json.dumps(file or make_file()), end_ids=[2])


def to_fields(tokenizer, **other):
    n = tokenizer.vocab_size
    fields = gguf_tokenizer.to_fields(tokenizer, n, ends=[2], bos=1)
    return fields | {f"tokenizer.ggml.{key}": value for key, value in other.items()}


def read(fields):
    content, ends = gguf_tokenizer.to_json(fields)
    return Tokenizer(content, end_ids=ends)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_bytes_are_the_same_after_writing_and_reading(kind):
    expected = make_tokenizer(with_all_splits(sentencepiece(**kind)) if kind else None)
    fields = to_fields(expected)
    actual = read(fields)
    for text in TEXTS:
        assert actual.encode_prompt(text) == expected.encode_prompt(text)
        assert actual.encode(text, continuation=True) == expected.encode(text, continuation=True)
        assert actual.decode(actual.encode(text)) == expected.decode(expected.encode(text))
    assert actual.vocab_size == expected.vocab_size
    assert actual.merges() == expected.merges()
    assert fields["tokenizer.ggml.add_bos_token"] is bool(expected.bos_ids)


def test_fields_are_those_of_llama_cpp():
    tokenizer = make_tokenizer()
    fields = to_fields(tokenizer)
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.pre"] == "default"
    assert fields["tokenizer.ggml.add_space_prefix"] is True
    assert "tokenizer.ggml.merges" not in fields
    types = fields["tokenizer.ggml.token_type"]
    assert types[:4] == [2, 3, 3, 6]  # unknown, control, control, byte
    assert types[258:260] == [6, 1]
    scores = fields["tokenizer.ggml.scores"]
    by_token = dict(zip(fields["tokenizer.ggml.tokens"], scores, strict=True))
    first, *_, last = tokenizer.merges()
    assert by_token["".join(first)] == 0
    assert by_token["".join(last)] == min(by_token["".join(p)] for p in tokenizer.merges())
    assert scores[0] == 0
    ids = {key: fields[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "unknown")}
    assert ids == {"bos": 1, "eos": 2, "unknown": 0}


def test_no_token_is_put_before_a_text_if_the_file_has_none():
    expected = make_tokenizer(make_file() | {"post_processor": None})
    fields = to_fields(expected)
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert read(fields).encode_prompt(b"x") == expected.encode_prompt(b"x")


def test_defaults_are_llama_cpps():
    expected = make_tokenizer()
    fields = to_fields(expected)
    for key in ("add_space_prefix", "add_bos_token", "bos_token_id", "eos_token_id"):
        del fields[f"tokenizer.ggml.{key}"]
    del fields["tokenizer.ggml.unknown_token_id"], fields["tokenizer.ggml.pre"]
    content, ends = gguf_tokenizer.to_json(fields)
    assert ends == [2]
    assert Tokenizer(content).encode_prompt(b"What is") == expected.encode_prompt(b"What is")
    assert content["model"]["unk_token"] == "<unk>"


def test_tokens_with_equal_scores_are_merged_from_the_left():
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", *byte_names, "▁", "▁▁", "▁▁▁", "▁▁▁▁", "a", "aa"],
        "tokenizer.ggml.scores": [0.0] * 258 + [-1e9, -1e9, -1e9, 0.0, 0.5],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = read(fields)
    named = [tokenizer.id_to_token(i) for i in tokenizer.encode(b" " * 7 + b"aaa")]
    assert named == ["▁▁▁▁", "▁▁▁", "aa", "a"]


def test_user_defined_tokens_are_matched_in_texts_and_control_tokens_are_not():
    fields = to_fields(make_tokenizer())
    names, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    names += ["  ", "<mask>", "<|end|>", "[PAD]"]
    types += [4, 4, 4, 5]
    fields["tokenizer.ggml.scores"] += [-1000.0] * 4
    fields["tokenizer.ggml.add_space_prefix"] = False
    content, ends = gguf_tokenizer.to_json(fields)
    tokenizer = Tokenizer(content, end_ids=ends)
    n = len(names)
    ids = tokenizer.encode(b"x  <mask><|end|><s>")
    assert n - 4 in ids
    assert n - 3 in ids
    assert not {n - 2, 1, n - 1} & set(ids)
    assert tokenizer.decode(ids) == b"x  <mask><|end|><s>"
    assert ends == [2, n - 2]  # by its name, as in llama.cpp
    assert tokenizer.vocab_size == n - 1  # unused tokens have no ids


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"scores": None}, "no list of scores"),
        ({"scores": [0.0]}, "scores do not match"),
        ({"scores": float("nan")}, "scores do not match"),
        ({"scores": "text"}, "scores do not match"),
        ({"tokens": ["a", 1]}, "no list of tokens"),
    ],
)
def test_damaged_fields_are_an_error(other, reason):
    fields = to_fields(make_tokenizer())
    if isinstance(other.get("scores"), str | float):
        other = {"scores": [other["scores"]] * len(fields["tokenizer.ggml.tokens"])}
    with pytest.raises(ModelError, match=reason):
        gguf_tokenizer.to_json(
            fields | {f"tokenizer.ggml.{key}": value for key, value in other.items()}
        )


def test_long_tokens_are_an_error():
    fields = to_fields(make_tokenizer())
    fields["tokenizer.ggml.tokens"][-1] = "x" * 10_000
    with pytest.raises(ModelError, match="a token of 10000 characters"):
        gguf_tokenizer.to_json(fields)


def test_tokenizers_that_llama_cpp_would_merge_otherwise_are_an_error():
    single = sentencepiece(normalizer=LEGACY)  # one merge per token: no other pair makes it
    with pytest.raises(TokenizerError, match=r"llama\.cpp cannot read the token '.*x00"):
        to_fields(make_tokenizer(single))
    single["model"]["vocab"] = with_all_splits(single)["model"]["vocab"]
    known = single["model"]["vocab"].keys()
    single["model"]["merges"] = [p for p in single["model"]["merges"] if "".join(p) in known]
    with pytest.raises(TokenizerError, match=r"llama\.cpp would also merge"):
        to_fields(make_tokenizer(single))
    parted = make_file()
    merges = parted["model"]["merges"]
    results = ["".join(pair) for pair in merges]
    repeated = next(i for i, token in enumerate(results) if token in results[:i])
    merges.append(merges.pop(repeated))
    with pytest.raises(TokenizerError, match=r"order of the merges"):
        to_fields(make_tokenizer(parted))


def test_words_that_are_split_are_an_error_if_tokens_span_words():
    file = with_all_splits(sentencepiece(splitter=metaspace("never", split=True)))
    expected = make_tokenizer(file)
    text = tokenizer_files.mixed(20_000).encode()
    assert read(to_fields(expected)).encode(text) == expected.encode(text)
    vocab, merges = file["model"]["vocab"], file["model"]["merges"]
    vocab["s▁t"] = max(vocab.values()) + 1
    merges.append(["s", "▁t"])
    with pytest.raises(TokenizerError, match="spans words"):
        to_fields(make_tokenizer(file))


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_prefix_only_before_other_characters_is_written_as_a_prefix(scheme):
    expected = make_tokenizer(with_all_splits(sentencepiece(splitter=metaspace(scheme))))
    fields = to_fields(expected)
    assert fields["tokenizer.ggml.add_space_prefix"] is True
    assert read(fields).encode(b"What is") == expected.encode(b"What is")
    assert "begins with a space" in gguf_tokenizer.describe_difference(expected)
    assert gguf_tokenizer.describe_difference(make_tokenizer()) == ""


def test_normalized_tokens_are_an_error():
    more = tokenizer_files.added(["<mask>"], 1600, special=False, normalized=True)
    file = make_file(more=more)
    n = len(file["model"]["vocab"])
    file["added_tokens"][-1]["id"] = n
    with pytest.raises(TokenizerError, match="cannot store normalized"):
        to_fields(make_tokenizer(file))


def test_phi_3_is_recognized_by_its_name():
    """llama.cpp strips the spaces after its control tokens; GGUF itself has no field for it."""
    names = ["<|endoftext|>", "<|user|>"]
    n = len(make_file()["model"]["vocab"])
    more = tokenizer_files.added(names, n)
    more[1]["rstrip"] = True
    file = make_file(more=more)
    file["added_tokens"][2]["rstrip"] = True  # </s>
    expected = make_tokenizer(file)
    with pytest.raises(TokenizerError, match="cannot store rstrip"):
        to_fields(expected)
    fields = gguf_tokenizer.to_fields(expected, n + 2, ends=[2], name="Phi-3-mini")
    fields["general.name"] = "Phi-3-mini"
    actual = read(fields)
    assert actual.spec.added_tokens == expected.spec.added_tokens
    chat = "<|user|>\n Hi</s> <|endoftext|> x"
    assert actual.encode_with_special(chat) == expected.encode_with_special(chat)


def test_too_many_merges_are_an_error(monkeypatch):
    vocab = {name: i for i, name in enumerate(("a", "b", "ab", "ba", "aba"))}
    assert len(merges.merges_by_score(vocab, [0.0] * 5)) == 4
    monkeypatch.setattr(merges, "_MAX_MERGES", 3)
    with pytest.raises(ModelError, match="more than 3 merges"):
        merges.merges_by_score(vocab, [0.0] * 5)
