"""llama.cpp itself, on files of ours: the same ids, the same logits, the same text."""

import ctypes
import json
from itertools import islice
from unicodedata import normalize

import numpy as np
import pytest

from support.models import TEXT, make_model
from tgen import api
from tgen.checkpoint import export, model_dir
from tgen.checkpoint.gguf import pre_tokenizers
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import RopeScaling, SamplingConfig
from tgen.tokenizer import Tokenizer, train_bpe, train_char

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="NO LLAMA.CPP: nothing shows that it runs our GGUF"
)
gguf = pytest.importorskip("gguf", reason="NO GGUF: nothing shows that llama.cpp runs ours")
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
]


@pytest.fixture(scope="module", params=["char", "bpe"])
def own_tokenizer(request):
    text = TEXT + "\n".join(TEXTS.values()).encode()
    return train_char([text]) if request.param == "char" else train_bpe([text], vocab_size=420)


def exported(tmp_path, tokenizer, family, *, stored="float32", **values):
    """A model's directory, and llama.cpp with its GGUF."""
    rows = tokenizer.vocab_size + 3  # as some models round their size up
    model = make_model(family, vocab_size=rows, **{"context_length": 256} | values)
    model_dir.save(tmp_path / "model", model.config, tokenizer, model.to_arrays())
    bundle = model_dir.load(tmp_path / "model")
    path = tmp_path / "model.gguf"
    export.to_gguf(bundle, path, name="it", stored=stored, progress=lambda _: None)
    return tmp_path / "model", llama(path)


def llama(path):
    """llama.cpp with a GGUF file, keys and values in float32."""
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
    """(V,): llama.cpp's after these ids."""
    theirs.eval(ids)
    place = llama_cpp.llama_get_logits_ith(theirs._ctx.ctx, -1)
    n = ours.bundle.config.vocab_size
    return np.array(ctypes.cast(place, ctypes.POINTER(ctypes.c_float * n)).contents)


@pytest.mark.parametrize(("family", "values"), MODELS)
def test_llama_cpp_gives_our_ids_and_goes_on_as_we_do(own_tokenizer, family, values, tmp_path):
    path, theirs = exported(tmp_path, own_tokenizer, family, **values)
    ours = api.load(path, device="cpu", threads=1)
    for text in TEXTS.values():
        ids = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == own_tokenizer.encode(text.encode())
        assert theirs.detokenize(ids) == text.encode()
    for text in list(TEXTS.values())[:4]:
        ids = own_tokenizer.encode(text.encode())
        sampling = SamplingConfig(temperature=0, max_new_tokens=50)
        answer = [token.id for token in ours.tokens([ids], sampling=sampling)]
        theirs.reset()
        told = list(islice(theirs.generate(ids, temp=0, reset=True), len(answer)))
        assert told == answer
        wanted = own_tokenizer.decode(answer)
        assert theirs.detokenize(told, prev_tokens=ids) == wanted


@pytest.mark.parametrize(("family", "values"), MODELS)
def test_its_logits_are_ours(tokenizer, family, values, tmp_path):
    path, theirs = exported(tmp_path, tokenizer, family, **values)
    ours = api.load(path, device="cpu", threads=1)
    ids = tokenizer.encode(TEXT)[:100]
    # ggml looks its GELU up in a table of float16 numbers
    close = 2e-3 if family == "gpt2" else 1e-4
    assert np.abs(logits(theirs, ids, ours) - ours.engine.extend([ids])[0]).max() <= close


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "int8"])
def test_it_loads_each_type(tokenizer, stored, tmp_path):
    _, theirs = exported(tmp_path, tokenizer, "llama", stored=stored)
    assert theirs.create_completion("What", max_tokens=5, temperature=0)["choices"][0]["text"]


@pytest.mark.parametrize("name", pre_tokenizers.KNOWN)
def test_every_name_that_is_known_cuts_as_llama_cpp_does(name, tmp_path):
    text = TEXT + "\n".join(TEXTS.values()).encode()
    described = json.loads(train_bpe([text], vocab_size=420).json)
    words = pre_tokenizers.KNOWN[name]
    described["pre_tokenizer"] = pre_tokenizers.pre_tokenizer(words.cuts)
    # a token that its own text does not become, so that it matters whether words are looked up
    described["model"]["vocab"].setdefault("Ġhard", 420)
    described["model"]["ignore_merges"] = words.whole_words
    described["normalizer"] = {"type": "NFC"} if words.nfc else None
    tokenizer = Tokenizer(json.dumps(described))
    _, theirs = exported(tmp_path, tokenizer, "llama")
    assert theirs.metadata["tokenizer.ggml.pre"] == name
    for text in TEXTS.values():
        if words.nfc:  # llama.cpp takes texts as they come
            text = normalize("NFC", text)
        ids = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == tokenizer.encode(text.encode())


def test_a_tokenizer_without_merges_is_taken(tmp_path):
    bytes_alone = train_char([b"plain"])
    assert not json.loads(bytes_alone.json)["model"]["merges"]
    _, theirs = exported(tmp_path, bytes_alone, "llama")
    for text in TEXTS.values():
        ids = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == bytes_alone.encode(text.encode())


def test_what_is_not_said_or_in_older_words_means_the_same_there(
    own_tokenizer, tmp_path, monkeypatch
):
    """Its own `add_bos_token`, and the older name of linear stretching."""
    writer = gguf.GGUFWriter
    monkeypatch.setattr(writer, "add_add_bos_token", lambda *_: None)
    monkeypatch.setattr(
        writer,
        "add_rope_scaling_factor",
        lambda self, factor: self.add_float32(f"{self.arch}.rope.scale_linear", factor),
    )
    stretched = RopeScaling(kind="linear", factor=4.0)
    _, theirs = exported(tmp_path, own_tokenizer, "qwen2", rope_scaling=stretched)
    assert not {"tokenizer.ggml.add_bos_token", "qwen2.rope.scaling.factor"} & set(theirs.metadata)
    ours = api.load(tmp_path / "model.gguf", device="cpu", threads=1)
    ids = theirs.tokenize(b"What is", add_bos=True, special=False)
    assert ids == ours.tokenizer.encode_prompt(b"What is")
    assert np.abs(logits(theirs, ids, ours) - ours.engine.extend([ids])[0]).max() <= 1e-4


def test_the_shipped_model_says_the_same_there(tmp_path):
    ours = api.load(shipped_model(), device="cpu", threads=1)
    bundle = model_dir.load(shipped_model())
    export.to_gguf(
        bundle, tmp_path / "it.gguf", name="it", stored="float32", progress=lambda _: None
    )
    theirs = llama(tmp_path / "it.gguf")
    for text in ("What is", "KING RICHARD:\n", "\n\n  The 3 houses"):
        said = theirs.create_completion(text, max_tokens=50, temperature=0)["choices"][0]["text"]
        assert said == "".join(ours.generate(text, temperature=0, max_new_tokens=50))
