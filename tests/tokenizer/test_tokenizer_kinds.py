"""Every supported kind of tokenizer.json: ids equal those of transformers, bytes survive."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from support.models import make_model
from support.tokenizer_files import (
    LEGACY,
    MAIN,
    added,
    files,
    mixed,
    more_files,
    openai_gpt,
    sentencepiece,
)
from tgen.checkpoint import model_dir
from tgen.config import SamplingConfig
from tgen.inspection.inspector import Inspector
from tgen.loaded_model import open_model
from tgen.python_api import Model
from tgen.tokenizer import TextStream, Tokenizer, patterns, train_char
from tgen.tokenizer.backend import Backend
from tgen.tokenizer.tokenizer import split_blocks

KINDS = sorted(files())
BYTE_LEVEL = [name for name in KINDS if not files()[name][0]["model"]["byte_fallback"]]
COMPOSED = ["qwen2", "thinking", "marks", "neox"]  # NFC changes the bytes of some texts
PREFIXED = ["prefix-space", "llama2", "mistral", "llama2-resaved", "always"]
some_text = st.one_of(st.text(), st.lists(st.sampled_from(mixed(3000).split(" "))).map(" ".join))
some_bytes = st.lists(st.one_of(st.binary(max_size=4), some_text.map(str.encode))).map(b"".join)


@cache
def tokenizer(name):
    return Tokenizer(json.dumps(files()[name][0]))


def load_transformers(name, path):
    from transformers import AutoTokenizer

    file, model_type, kind = files()[name]
    contents = {
        "tokenizer.json": file,
        "config.json": {"model_type": model_type, "transformers_version": "5.23.0"},
        # transformers ignores add_bos_token if there is a tokenizer.json.
        "tokenizer_config.json": {"tokenizer_class": kind, "add_bos_token": name == "smollm"},
    }
    for inside, content in contents.items():
        (path / inside).write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(path, split_special_tokens=True)


@pytest.mark.parametrize("name", KINDS)
def test_ids_equal_those_of_transformers(name, tmp_path):
    tok, auto = tokenizer(name), load_transformers(name, tmp_path)
    long = mixed(1 << 18 if name in MAIN else 1 << 16)
    for text in (long, "a", "\n", "  two", " <s> </s>", "\0", "", "a<think> b¿té? c"):
        assert tok.encode(text.encode()) == auto(text, add_special_tokens=False)["input_ids"]
    assert tok.encode_prompt(b"Hello") == auto("Hello")["input_ids"]


@pytest.mark.parametrize("name", KINDS)
def test_long_texts_are_cut_without_changing_tokens(name, monkeypatch):
    tok, text = tokenizer(name), mixed(1 << 15, seed=5)
    whole = tok.encode(text.encode())
    monkeypatch.setattr("tgen.tokenizer.tokenizer._BLOCK", 5)
    n_blocks = len(list(split_blocks(text, tok._cut)))
    assert n_blocks == 1 if name == "always" else n_blocks > 200
    assert tok.encode(text.encode()) == whole


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(data=some_bytes)
@settings(max_examples=40, deadline=None)
def test_any_bytes_survive_byte_level_tokenizers(name, data):
    tok = tokenizer(name)
    if name in COMPOSED:
        data = data.decode(errors="ignore").encode("ascii", "ignore") + data[:1]
    if name in PREFIXED:
        data = data.lstrip(b" ")
    assert tok.decode(tok.encode(data)) == data
    assert tok.decode(tok.encode(data, continuation=True), continuation=True) == data


@pytest.mark.parametrize("name", sorted(set(KINDS) - set(BYTE_LEVEL)))
@given(data=some_bytes)
@settings(max_examples=40, deadline=None)
def test_any_bytes_survive_sentencepiece_tokenizers(name, data):
    tok = tokenizer(name)
    data = data.replace("▁".encode(), b"_")  # the character for a space
    if name in ("mistral", "llama2-resaved", "always"):  # they add none before a space
        data = data.lstrip(b" ")
    assert tok.decode(tok.encode(data)) == data
    assert tok.decode(tok.encode(data, continuation=True), continuation=True) == data


@pytest.mark.parametrize("name", KINDS)
@given(data=some_bytes)
@settings(max_examples=25, deadline=None)
def test_streamed_text_equals_decoded_text(name, data):
    tok, stream = tokenizer(name), TextStream()
    ids = tok.encode(data)
    pieces = [stream.feed(tok.token_bytes(i)) for i in ids]
    assert b"".join(pieces) + stream.flush() == tok.decode(ids, continuation=True)
    space = b" " if name in PREFIXED and tok.decode(ids, continuation=True)[:1] == b" " else b""
    assert space + tok.decode(ids) == tok.decode(ids, continuation=True)


@pytest.mark.parametrize("name", ["llama2", "mistral", "prefix-space"])
def test_space_prefix_is_only_added_at_the_start_of_a_text(name):
    tok = tokenizer(name)
    assert tok.decode(tok.encode(b"is"), continuation=True) == b" is"
    assert tok.decode(tok.encode(b"is")) == b"is"
    assert tok.decode(tok.encode(b"is", continuation=True), continuation=True) == b"is"
    assert tok.decode(tok.encode(b"a\xffb"), continuation=True) == b" a\xffb"
    assert tok.decode(tok.encode(b"\xff b")) == b"\xff b"


@pytest.mark.parametrize("name", sorted(more_files()))
def test_ids_of_rarer_kinds_equal_those_of_the_library_in_cut_texts_too(name, monkeypatch):
    file = more_files()[name]
    tok, library = Tokenizer(json.dumps(file)), Backend.from_str(json.dumps(file))
    library.encode_special_tokens = True
    text = mixed(1 << 15, seed=3)
    expected = library.encode(text, add_special_tokens=False).ids
    assert tok.encode(text.encode()) == expected
    monkeypatch.setattr("tgen.tokenizer.tokenizer._BLOCK", 5)
    assert len(list(split_blocks(text, tok._cut))) > 200
    assert tok.encode(text.encode()) == expected


@pytest.mark.parametrize("pattern", sorted(patterns.COVERING))
def test_removing_what_does_not_match_removes_nothing(pattern):
    codes = [*range(0x3000), *range(0x3000, 0xD800, 5), *range(0xE000, 0x20000, 5)]
    characters = list(map(chr, codes))
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    for text in ("".join(characters), " ".join(characters), "a".join(characters)):
        assert "".join(piece for piece, _ in split.pre_tokenize_str(text)) == text


def test_openai_gpt_gives_ids_and_text_of_the_library(monkeypatch):
    file = openai_gpt()
    tok, library = Tokenizer(json.dumps(file)), Backend.from_str(json.dumps(file))
    library.encode_special_tokens = True
    text = "".join(c for c in mixed(1 << 15) if c.isascii() and (c.isprintable() or c == "\n"))
    for part in (text, "The King's <unk>!", " a\tb \n", "naïve ÉTÉ", ""):
        ids = library.encode(part, add_special_tokens=False).ids
        assert tok.encode(part.encode()) == ids
        assert tok.decode(ids).decode() == library.decode(ids)
    assert tok.decode(tok.encode(b"The end"), continuation=True) == b"the end "
    monkeypatch.setattr("tgen.tokenizer.tokenizer._BLOCK", 5)
    assert tok.encode(text.encode()) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama2", "gemma3"])
def test_flags_of_added_tokens_are_those_of_the_library(flag, special, kind, monkeypatch):
    file = json.loads(json.dumps(files()[kind][0]))
    ids = {t["id"] for t in file["added_tokens"]} | set(file["model"]["vocab"].values())
    flags = {"special": special, flag: True}
    file["added_tokens"] += added(["<|user|>"], max(ids) + 1, **flags)
    tok, library = Tokenizer(json.dumps(file)), Backend.from_str(json.dumps(file))
    text = "a  <|user|>  b<|user|>c\n\n<|user|>\n\n x<|user|> <|user|>\n<|user|>\nend" * 3
    with_special = library.encode(text, add_special_tokens=False).ids
    assert [i for i, _, _ in tok.encode_with_special(text)] == with_special
    library.encode_special_tokens = True
    expected = library.encode(text, add_special_tokens=False).ids
    assert tok.encode(text.encode()) == expected
    monkeypatch.setattr("tgen.tokenizer.tokenizer._BLOCK", 5)
    assert tok.encode(text.encode()) == expected


def test_prompt_starts_with_the_tokens_of_its_model():
    prompts = {name: tokenizer(name).encode_prompt(b"") for name in KINDS}
    assert prompts["llama2"] == prompts["mistral"] == [1]
    assert prompts["llama3"] == list(tokenizer("llama3").bos_ids) != []
    assert prompts["gpt2"] == [tokenizer("gpt2").end_of_text]
    assert prompts["thinking"] == []
    assert tokenizer("llama2").decode([1, *tokenizer("llama2").encode(b"Hi")]) == b"Hi"
    after = sentencepiece(normalizer=LEGACY)
    after["post_processor"]["single"].append(after["post_processor"]["single"][0])
    assert Tokenizer(json.dumps(after)).encode_prompt(b"") == [1]
    assert train_char([b"ab"]).encode_prompt(b"ab") == train_char([b"ab"]).encode(b"ab")


def test_generated_text_of_a_model_with_a_space_prefix_continues_its_prompt(tmp_path):
    tok = tokenizer("llama2")
    model = make_model("llama", vocab_size=tok.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tok, model.to_arrays())
    loaded = open_model(tmp_path / "m")
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=12, require=[b" is"])
    prompt = loaded.encode("The")
    pieces = list(loaded.pieces(loaded.tokens([prompt], sampling=sampling)))
    written = b"".join(piece for _, piece in pieces)
    assert prompt[0] == 1
    assert b"The" + written == tok.decode([*prompt, *(token.id for token, _ in pieces)])
    assert b" is" in written
    assert loaded.vocabulary.encode(b" is") == tok.encode(b" is", continuation=True)
    assert Model(loaded).score("The king") > 0
    inspector = Inspector(loaded.bundle, b"The king")
    assert inspector.tokens[:2] == [b"", tok.token_bytes(prompt[1])]


def test_added_tokens_are_spelled_verbatim_not_in_byte_characters():
    tok, text = tokenizer("thinking"), "so<think>¿té? yes".encode()
    assert len(tok.encode("¿té?".encode())) == 1
    assert tok.decode(tok.encode(text)) == text


def test_text_with_added_tokens_that_get_a_space_prefix_is_not_cut(monkeypatch):
    n = len(sentencepiece()["model"]["vocab"])
    file = sentencepiece(normalizer=LEGACY, more=added(["<tool>"], n, special=False))
    tok, library = Tokenizer(json.dumps(file)), Backend.from_str(json.dumps(file))
    library.encode_special_tokens = True
    text = "one <tool> two\nthree <tool>\nfour" * 9
    monkeypatch.setattr("tgen.tokenizer.tokenizer._BLOCK", 5)
    assert tok.encode(text.encode()) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", MAIN)
def test_merge_pairs_spell_their_token(name):
    tok = tokenizer(name)
    merged = [(i, *pair) for i, pair in enumerate(tok.merge_pairs.tolist()) if pair[0] >= 0]
    assert len(merged) > 400
    for whole, left, right in merged:
        assert tok.token_bytes(whole) == tok.token_bytes(left) + tok.token_bytes(right)
