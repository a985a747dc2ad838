"""vocab.json with merges.txt, and tokenizer.model, in place of tokenizer.json."""

import json

import pytest

from support.models import make_model
from tgen.checkpoint import export, model_dir
from tgen.checkpoint.hf.older_tokenizers import read_older_tokenizer
from tgen.errors import ModelError, TokenizerError
from tgen.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello world, it's  12345 o'clock!\n\n  What",
    "naïve cafe\u0301 über\t日本語 🙂",
    " leads with a space",
    "don't  stop   here \n",
    "",
]
CORPUS = " ".join(TEXTS) * 3 + "the quick brown fox jumps over the lazy dog. " * 20


def write_vocab(path, tokenizer, **config):
    """Write the older files of a byte-level tokenizer, with a second special token after it."""
    model = json.loads(tokenizer.json)["model"]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (path / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": len(model["vocab"])}))
    special = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (path / "special_tokens_map.json").write_text(json.dumps(special))


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {"tokenizer_class": "Qwen2TokenizerFast"},
        {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None},
    ],
)
def test_ids_are_those_of_transformers(config, tokenizer, tmp_path):
    write_vocab(tmp_path, tokenizer, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(read_older_tokenizer(tmp_path, "gpt2"))
    for text in TEXTS:
        assert ours.encode(text.encode()) == theirs(text)["input_ids"], text
    assert ours.added_tokens["<|im_end|>"] == theirs.convert_tokens_to_ids("<|im_end|>")
    assert ours.token_bytes(ours.added_tokens["<|im_end|>"]) == b""  # special


def test_model_without_tokenizer_json_is_loaded_and_exported(tokenizer, tmp_path):
    path = tmp_path / "it"
    model = make_model("qwen2", vocab_size=tokenizer.vocab_size + 1)
    model_dir.save(path, model.config, tokenizer, model.to_arrays())
    (path / "tokenizer.json").unlink()
    write_vocab(path, tokenizer, add_bos_token=True, bos_token="<|endoftext|>")
    bundle = model_dir.load(path)
    assert bundle.tokenizer.spec.nfc  # Qwen's, by the model's type
    assert bundle.tokenizer.bos_ids == (bundle.tokenizer.end_of_text,)
    export.export_transformers(
        bundle, tmp_path / "out", stored="f32", max_shard_bytes=1 << 30, progress=lambda _: None
    )
    again = model_dir.load(tmp_path / "out").tokenizer
    assert again.encode(CORPUS.encode()) == bundle.tokenizer.encode(CORPUS.encode())


def test_an_id_that_is_no_number_is_damage(tmp_path):
    piece = b"\n\1a"  # field 1, the text
    trainer = b"\x18\2\xca\2\0019"  # BPE, and text as the id of the beginning
    (tmp_path / "tokenizer.model").write_bytes(b"\n\3" + piece + b"\x12\6" + trainer)
    with pytest.raises(ModelError, match="is not a model of sentencepiece"):
        read_older_tokenizer(tmp_path, "llama")


def test_other_classes_are_named(tokenizer, tmp_path):
    write_vocab(tmp_path, tokenizer, tokenizer_class="WhisperTokenizer")
    with pytest.raises(TokenizerError, match="class 'WhisperTokenizer'"):
        read_older_tokenizer(tmp_path, "gpt2")


def train(path, **settings):
    sentencepiece = pytest.importorskip("sentencepiece", reason="NO SENTENCEPIECE")
    (path / "corpus.txt").write_text(CORPUS)
    options = {
        "model_type": "bpe",
        "vocab_size": 420,
        "byte_fallback": True,
        "minloglevel": 2,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
        "character_coverage": 1.0,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "corpus.txt"), model_prefix=str(path / "tokenizer"), **options | settings
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({}, {}),
        ({"add_dummy_prefix": False}, {"add_bos_token": False}),
        ({"user_defined_symbols": ["\n\n", "<turn>"]}, {}),
        ({"split_digits": True, "allow_whitespace_only_pieces": True}, {"legacy": False}),
    ],
)
def test_sentencepiece_models_give_the_ids_of_sentencepiece(settings, config, tmp_path):
    theirs = train(tmp_path, **settings)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer(read_older_tokenizer(tmp_path, "llama"))
    assert ours.bos_ids == (() if config.get("add_bos_token") is False else (theirs.bos_id(),))
    exact = "user_defined_symbols" not in settings and "legacy" not in config
    texts = [*TEXTS, CORPUS[:2000]]
    for text in texts if exact else [text for text in texts if text[:1] != " "]:
        assert ours.encode(text.encode()) == theirs.encode(text), text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "unigram"}, "a model of Unigram"),
        ({"normalization_rule_name": "nmt_nfkc"}, "the normalizer nmt_nfkc"),
        ({"remove_extra_whitespaces": True}, "the removal of extra spaces"),
    ],
)
def test_other_sentencepiece_models_are_refused_with_the_reason(settings, reason, tmp_path):
    train(tmp_path, **settings)
    with pytest.raises(TokenizerError, match=reason):
        read_older_tokenizer(tmp_path, "llama")


@pytest.mark.parametrize(
    "content", [b"", b"\x0a\xff\xff", b"\xff" * 50, b"\x0a\x02\x0a\x00", b"{}"]
)
def test_damaged_sentencepiece_models_are_an_error(content, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises((ModelError, TokenizerError)):
        Tokenizer(read_older_tokenizer(tmp_path, "llama"))
