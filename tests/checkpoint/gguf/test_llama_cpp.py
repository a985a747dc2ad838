"""llama.cpp on exported files: the same ids, the same logits, the same text."""

import ctypes
import json
import math
from itertools import islice
from typing import get_args
from unicodedata import normalize

import numpy as np
import pytest

from support.gguf_vocabularies import KINDS, make_file, with_all_splits
from support.models import TEXT, make_model
from support.tokenizer_files import sentencepiece
from tgen.checkpoint import export, model_dir
from tgen.checkpoint.gguf import pre_tokenizers
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import EngineOptions, GgufType, RopeScaling, SamplingConfig
from tgen.loaded_model import open_model
from tgen.python_api import load
from tgen.tokenizer import Tokenizer, train_bpe, train_char

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="NO LLAMA.CPP: exported GGUF files are not tested with it"
)
gguf = pytest.importorskip("gguf", reason="NO GGUF: exported files are not tested with llama.cpp")
pytestmark = pytest.mark.slow

TEXTS = {
    "words": "What is the king? 'Tis naïve; they'll've said: WE'RE here, I'd say.",
    "emoji": "🦋 and 🙂‍↔️, 👩‍👩‍👧 — é, e\u0301, ﷽, \u200d\ufeff",
    "CJK": "日本語のテキスト、中文混排 한국어 123日",
    "code": "def f(x):\n\tif x >= 10_000:\r\n    return {'a': [1.5e-3, 0xFF]} # comment\n",
    "digits": "1 12 123 1234 12345678901234567890 ½ ٣٤ Ⅷ 3.14",
    "line breaks": "a\n\nb\n\n\n\n  c \n \n\t\nd   \r\n\r\n e\n",
    "control tokens' names": "<|endoftext|> is no end, <|pad|>",
    "spaces": "   three  two one \u00a0 hard\u3000wide   ",
}
SCALED = RopeScaling(factor=4.0, original_context_length=32)
YARN = RopeScaling(
    kind="yarn",
    factor=4.0,
    original_context_length=64,
    attention_factor=0.1 * math.log(4) + 1,
)
LONGROPE = RopeScaling(
    kind="longrope",
    factor=4.0,
    original_context_length=256,
    attention_factor=1.1,
    short_factor=(1.0, 1.5, 2.0, 2.5),
    long_factor=(2.0, 3.0, 4.0, 5.0),
)
GEMMA = {"attention_scale": 0.25}  # 1 / sqrt(head_dim)
WINDOWS = {"n_layers": 5, "sliding_layers": (True, True, True, False, True)}
OLMO3 = WINDOWS | {"local_rope_theta": 500_000.0}
WITHOUT_WINDOW = {"sliding_window": None, "sliding_layers": None}
SMOLLM3 = {"n_layers": 5, "rope_layers": (True, True, True, False, True)}
MODELS = [
    ("gpt2", {}),
    ("gpt2", {"tied_embeddings": False, "d_ff": 96}),
    ("llama", {}),
    ("llama", {"attention_bias": True, "output_bias": True, "feed_forward_bias": True}),
    ("llama", {"rope_scaling": SCALED, "head_dim": 16, "tied_embeddings": False}),
    ("mistral", {"sliding_window": 256}),
    ("qwen2", {}),
    ("qwen2", {"rope_scaling": RopeScaling(kind="linear", factor=2.0)}),
    ("qwen3", {"head_dim": 16}),
    ("gpt_neox", {}),
    ("gpt_neox", {"norm_placement": "pre", "tied_embeddings": True, "rope_theta": 500.0}),
    ("phi3", {"sliding_window": None}),
    ("phi3", {"sliding_window": None, "rotary_dim": None, "rope_scaling": LONGROPE}),
    ("gemma3", GEMMA),
    ("gemma3", GEMMA | {"rope_scaling": RopeScaling(kind="linear", factor=4.0)}),
    ("gemma3", GEMMA | {"n_layers": 7, "sliding_layers": (True,) * 5 + (False, True)}),
    ("olmo2", {}),
    ("olmo2", {"tied_embeddings": True}),
    ("smollm3", SMOLLM3),
    ("smollm3", SMOLLM3 | {"tied_embeddings": False}),
    ("granite", {}),
    ("granite", {"tied_embeddings": True}),
    ("starcoder2", {"sliding_window": None}),
    ("llama", {"rope_scaling": YARN, "head_dim": 16}),
    ("gemma", {"head_dim": 16}),
    ("olmo", {}),
    ("olmo3", OLMO3),
    ("olmo3", OLMO3 | {"rope_scaling": YARN}),
    ("phi", {}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"n_kv_heads": 4, "tied_embeddings": False}),
    ("stablelm", {"attention_bias": True}),
    ("stablelm", {"norm_placement": "pre", "tied_embeddings": True}),
    ("cohere", {}),
    ("cohere2", WINDOWS),
    ("glm4", {"head_dim": 16, "rotary_dim": 8}),
    ("arcee", {"rope_scaling": SCALED}),
    ("seed_oss", {"head_dim": 16}),
    ("seed_oss", {"attention_bias": False}),
    ("hunyuan", {"head_dim": 16}),
    ("exaone4", WITHOUT_WINDOW),
    ("exaone4", WITHOUT_WINDOW | {"rope_scaling": SCALED}),
]


@pytest.fixture(scope="module", params=["char", "bpe"])
def own_tokenizer(request):
    text = TEXT + "\n".join(TEXTS.values()).encode()
    return train_char([text]) if request.param == "char" else train_bpe([text], vocab_size=420)


def export_model(tmp_path, tokenizer, family, *, stored="f32", **values):
    """Return a model's directory, and llama.cpp with its GGUF file."""
    n_tokens = tokenizer.vocab_size + 3  # some models round their size up
    model = make_model(family, vocab_size=n_tokens, **{"context_length": 256} | values)
    model_dir.save(tmp_path / "model", model.config, tokenizer, model.to_arrays())
    bundle = model_dir.load(tmp_path / "model")
    path = tmp_path / "model.gguf"
    export.export_gguf(bundle, path, name="it", stored=stored, progress=lambda _: None)
    return tmp_path / "model", open_llama_cpp(path)


def open_llama_cpp(path):
    """Open a GGUF file in llama.cpp, keys and values in float32."""
    return llama_cpp.Llama(
        str(path),
        n_ctx=256,
        n_threads=1,
        n_threads_batch=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        verbose=False,
    )


def logits(theirs, ids, ours):
    """Return llama.cpp's logits, (V,), after these ids."""
    theirs.eval(ids)
    address = llama_cpp.llama_get_logits_ith(theirs._ctx.ctx, -1)
    n = ours.bundle.config.vocab_size
    return np.array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float * n)).contents)


def assert_near_tie(ours, ids, answer, continuation):
    """Assert that two answers differ first where two tokens' logits are almost equal."""
    pairs = enumerate(zip(answer, continuation, strict=True))
    n, different = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    if different[1] >= ours.tokenizer.vocab_size:
        return  # llama.cpp generates ids that are no tokens, too
    engine = ours.engine.clone()
    a, b = engine.extend([ids + answer[:n]])[0][list(different)]
    assert abs(a - b) <= 2 * tolerance(ours.bundle.config.family)


def tolerance(family):
    """Largest difference of logits: ggml looks up GELU in a float16 table."""
    gelu = ("gpt2", "gpt_neox", "starcoder2", "phi", "gpt_bigcode")
    return (dict.fromkeys(gelu, 2e-3) | {"gemma": 5e-3, "gemma3": 5e-3}).get(family, 1e-4)


@pytest.mark.parametrize(("family", "values"), MODELS)
def test_llama_cpp_gives_the_same_ids_and_text(own_tokenizer, family, values, tmp_path):
    path, theirs = export_model(tmp_path, own_tokenizer, family, **values)
    ours = open_model(path, EngineOptions(device="cpu", threads=1, dtype="float32"))
    for text in TEXTS.values():
        ids = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == own_tokenizer.encode(text.encode())
        assert theirs.detokenize(ids) == text.encode()
    for text in list(TEXTS.values())[:4]:
        ids = own_tokenizer.encode(text.encode())
        sampling = SamplingConfig(temperature=0, max_new_tokens=50)
        answer = [token.id for token in ours.tokens([ids], sampling=sampling)]
        theirs.reset()
        continuation = list(islice(theirs.generate(ids, temp=0, reset=True), len(answer)))
        if continuation != answer:
            assert_near_tie(ours, ids, answer, continuation)
            continue
        expected = own_tokenizer.decode(answer)
        assert theirs.detokenize(continuation, prev_tokens=ids) == expected


@pytest.mark.parametrize(("family", "values"), MODELS)
def test_logits_are_equal(tokenizer, family, values, tmp_path):
    path, theirs = export_model(tmp_path, tokenizer, family, **values)
    ours = open_model(path, EngineOptions(device="cpu", threads=1, dtype="float32"))
    ids = tokenizer.encode(TEXT)[:100]
    difference = np.abs(logits(theirs, ids, ours) - ours.engine.extend([ids])[0]).max()
    assert difference <= tolerance(family)


@pytest.mark.parametrize("stored", get_args(GgufType))
def test_llama_cpp_loads_every_type(tokenizer, stored, tmp_path):
    _, theirs = export_model(tmp_path, tokenizer, "llama", stored=stored, d_model=256)
    assert theirs.create_completion("What", max_tokens=5, temperature=0)["choices"][0]["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_sentencepiece_tokenizers_give_the_same_ids(kind, tmp_path):
    file = make_file() if not kind else with_all_splits(sentencepiece(**kind))
    tokenizer = Tokenizer(json.dumps(file), end_ids=[2])
    _, theirs = export_model(tmp_path, tokenizer, "llama")
    for text in TEXTS.values():
        ids = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == tokenizer.encode_prompt(text.encode())


@pytest.mark.parametrize("name", pre_tokenizers.PRE_TOKENIZERS)
def test_pre_tokenizers_split_like_llama_cpp(name, tmp_path):
    corpus = TEXT + "\n".join(TEXTS.values()).encode()
    tokenizer_json = json.loads(train_bpe([corpus], vocab_size=420).json)
    pre_tokenizer = pre_tokenizers.PRE_TOKENIZERS[name]
    tokenizer_json["pre_tokenizer"] = pre_tokenizers.pre_tokenizer_json(pre_tokenizer)
    # no merges make this token: ignore_merges matters
    tokenizer_json["model"]["vocab"].setdefault("Ġhard", 420)
    tokenizer_json["model"]["ignore_merges"] = pre_tokenizer.ignore_merges
    tokenizer_json["normalizer"] = {"type": "NFC"} if pre_tokenizer.nfc else None
    tokenizer = Tokenizer(json.dumps(tokenizer_json))
    _, theirs = export_model(tmp_path, tokenizer, "llama")
    assert theirs.metadata["tokenizer.ggml.pre"] == ("llama-bpe" if name == "glm4" else name)
    for text in TEXTS.values():
        if name in ("gpt-4o", "tekken", "falcon") and not text.isascii():
            continue  # llama.cpp's patterns differ for capitals, marks and emoji
        if name == "deepseek-llm" and any(map(str.isnumeric, text)):
            continue  # llama.cpp does not split numbers; DeepSeek's vocabulary has single digits
        if pre_tokenizer.nfc:  # llama.cpp does not normalize
            text = normalize("NFC", text)
        ids = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == tokenizer.encode(text.encode())


def test_tokenizer_without_merges(tmp_path):
    byte_tokenizer = train_char([b"plain"])
    assert not json.loads(byte_tokenizer.json)["model"]["merges"]
    _, theirs = export_model(tmp_path, byte_tokenizer, "llama")
    for text in TEXTS.values():
        ids = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == byte_tokenizer.encode(text.encode())


def test_missing_and_older_fields_mean_the_same_in_llama_cpp(own_tokenizer, tmp_path, monkeypatch):
    """The default of `add_bos_token`, and the older name of linear RoPE scaling."""
    writer = gguf.GGUFWriter
    add_float32 = writer.add_float32
    monkeypatch.setattr(writer, "add_bool", lambda *_: None)  # add_bos_token is the only one
    monkeypatch.setattr(
        writer,
        "add_float32",
        lambda self, key, value: add_float32(
            self, key.replace("rope.scaling.factor", "rope.scale_linear"), value
        ),
    )
    scaled = RopeScaling(kind="linear", factor=4.0)
    _, theirs = export_model(tmp_path, own_tokenizer, "qwen2", rope_scaling=scaled)
    assert not {"tokenizer.ggml.add_bos_token", "qwen2.rope.scaling.factor"} & set(theirs.metadata)
    ours = open_model(
        tmp_path / "model.gguf", EngineOptions(device="cpu", threads=1, dtype="float32")
    )
    ids = theirs.tokenize(b"What is", add_bos=True, special=False)
    assert ids == ours.tokenizer.encode_prompt(b"What is")
    assert np.abs(logits(theirs, ids, ours) - ours.engine.extend([ids])[0]).max() <= 1e-4


def test_shipped_model_gives_the_same_text(tmp_path):
    ours = load(shipped_model(), device="cpu", threads=1, dtype="float32")
    bundle = model_dir.load(shipped_model())
    export.export_gguf(
        bundle, tmp_path / "it.gguf", name="it", stored="f32", progress=lambda _: None
    )
    theirs = open_llama_cpp(tmp_path / "it.gguf")
    for prompt in ("What is", "KING RICHARD:\n", "\n\n  The 3 houses"):
        completion = theirs.create_completion(prompt, max_tokens=50, temperature=0)
        text = ours.generate(prompt, temperature=0, max_new_tokens=50)
        assert completion["choices"][0]["text"] == text
