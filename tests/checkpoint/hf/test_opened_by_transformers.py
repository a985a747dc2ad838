"""Models that tgen writes, opened by transformers; `scripts/interop` runs this with 4.57."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support.models import ALL_FAMILIES, TEXT, make_model
from support.transformers_models import VARIANTS as THEIR_MODELS
from support.transformers_models import make_theirs
from tgen.checkpoint import model_dir
from tgen.checkpoint.dtypes import to_float32
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import EngineOptions, RopeScaling, SamplingConfig
from tgen.loaded_model import open_model
from tgen.model.transformer import Transformer
from tgen.python_api import load, train
from tgen.reports.training import DoneReport
from tgen.tokenizer import Tokenizer, train_bpe, train_char

transformers = pytest.importorskip("transformers")

MIXED = TEXT[:300].decode() + "unseen: ñ 🙂‍↔️ \t\r\n  x = {'a': 12345}  # 漢字"
LLAMA_3 = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=16
)
VARIANTS = [
    *((family, {}) for family in ALL_FAMILIES),
    ("gpt2", {"d_ff": 96, "activation": "gelu"}),
    ("llama", {"tied_embeddings": False, "attention_bias": True, "output_bias": True}),
    ("llama", {"rope_scaling": LLAMA_3}),
    ("llama", {"rope_scaling": RopeScaling(kind="linear", factor=2.0), "rope_theta": 5e5}),
    ("mistral", {"sliding_window": None}),
    ("qwen3", {"tied_embeddings": False, "head_dim": 16}),
]

UNTIED = [(name, False) for name in THEIR_MODELS if name not in ("openai-gpt", "gpt2")]
TIED = [(name, True) for name in THEIR_MODELS if " " not in name]  # one of each family


@pytest.fixture
def transformers_warnings() -> Iterator[list[str]]:
    """Collect transformers' log messages, warnings and above."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    yield warnings
    logger.removeHandler(handler)


def open_in_transformers(path: Path, warnings: list[str]):
    """Return the model and its tokenizer; opening them logs no warning."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    assert transformers.GenerationConfig.from_pretrained(path).eos_token_id == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert not warnings
    return model.eval(), tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Save the tokenizer as transformers does."""
    (path / "tokenizer.json").write_text(tokenizer.json)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    fast.save_pretrained(path)


def assert_same(path: Path, warnings: list[str]) -> None:
    """Compare ids, text, logits and greedy decoding."""
    theirs, tokenizer = open_in_transformers(path, warnings)
    ours = open_model(path, EngineOptions(device="cpu", threads=1, dtype="float32"))
    ids = ours.tokenizer.encode(MIXED.encode())
    if ours.bundle.config.family != "qwen2":  # version 5 always uses Qwen's own tokenizer
        assert tokenizer.encode(MIXED) == tokenizer.encode(MIXED, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == MIXED
    n = 16
    prompt = ids[: ours.engine.context_length - n]
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt])).logits[0].numpy()
        in_double = theirs.double()(torch.tensor([prompt])).logits[0]
        theirs.float()
        model = Transformer.from_arrays(ours.bundle.config, model_dir.load(path).arrays).double()
        assert (model(torch.tensor([prompt]))[0] - in_double).abs().max() <= 1e-5
    our_logits = ours.engine.extend([prompt], every_position=True)
    # transformers' own two kernels differ by 1.5e-5 at logits of 20
    assert np.abs(our_logits - logits).max() <= 1e-5 * max(1, np.abs(logits).max())
    text = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=n,
        do_sample=False,
        temperature=None,
        top_k=None,
    )
    sampling = SamplingConfig(temperature=0, max_new_tokens=n)
    generated = [token.id for token in ours.tokens([prompt], sampling=sampling)]
    expected = text[0, len(prompt) :].tolist()
    assert expected[: len(generated)] == generated
    assert set(expected[len(generated) :]) <= {0}  # transformers also returns the end-of-text token


@pytest.fixture(scope="module")
def char_tokenizer() -> Tokenizer:
    return train_char([TEXT])


@pytest.fixture(scope="module")
def bpe_tokenizer() -> Tokenizer:
    return train_bpe([TEXT])


@pytest.mark.parametrize(
    ("family", "values", "tokenizer_kind"),
    [(*variant, "bpe_tokenizer") for variant in VARIANTS]
    + [(family, {}, "char_tokenizer") for family in ALL_FAMILIES],
)
def test_saved_model_opens_in_transformers(
    family, values, tokenizer_kind, request, tmp_path, transformers_warnings
):
    tokenizer: Tokenizer = request.getfixturevalue(tokenizer_kind)
    model = make_model(family, vocab_size=tokenizer.vocab_size, context_length=64, **values)
    model_dir.save(tmp_path, model.config, tokenizer, model.to_arrays())
    assert_same(tmp_path, transformers_warnings)


def test_trained_model_opens_in_transformers(trained, transformers_warnings):
    assert_same(trained, transformers_warnings)


@pytest.mark.parametrize(
    ("variant", "tied"),
    [(name, i % 2 == 0) for i, name in enumerate(n for n in THEIR_MODELS if " " not in n)]
    + [("phi", False)],  # with a bias of the logits
)
def test_fine_tuned_model_opens_in_transformers(
    variant, tied, tokenizer, tmp_path, transformers_warnings
):
    """transformers saves a model in bfloat16, tgen fine-tunes it, transformers opens it again."""
    theirs = make_theirs(variant, tokenizer, tied=tied)
    theirs.generation_config.eos_token_id = 0
    theirs.bfloat16().save_pretrained(tmp_path / "theirs")
    save_tokenizer(tokenizer, tmp_path / "theirs")
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    overrides = {"batch_size": "4", "context_length": "32", "eval_every": "3"}
    overrides |= {"learning_rate": "0.05", "warmup_steps": "0"}  # changes bfloat16 numbers near 1
    reports = train(
        tmp_path / "corpus.txt",
        out=tmp_path / "tuned",
        start_from=tmp_path / "theirs",
        steps=3,
        threads=1,
        overrides=overrides,
    )
    assert isinstance(list(reports)[-1], DoneReport)
    old, new = (model_dir.load(tmp_path / name) for name in ("theirs", "tuned"))
    assert new.config == old.config
    assert not any(
        np.array_equal(to_float32(old.arrays[n]), to_float32(a)) for n, a in new.arrays.items()
    )
    transformers_warnings.clear()
    assert_same(tmp_path / "tuned", transformers_warnings)


def test_shipped_model_opens_in_transformers(transformers_warnings):
    assert_same(shipped_model(), transformers_warnings)


def test_converted_model_equals_the_opened_one(family, tokenizer, tmp_path):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    ours = load(tmp_path / "m", device="cpu", threads=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    converted = ours.to_transformers()
    expected = theirs.state_dict()
    actual = converted.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert converted.config.eos_token_id == theirs.config.eos_token_id == 0
    arrays, tensors = ours.weights(), ours.weights("torch")
    assert arrays.keys() == tensors.keys()
    for name, array in arrays.items():
        assert np.array_equal(array, tensors[name].numpy())
        # Version 5 has another name for GPT-NeoX's head, in its models only.
        name = name if name in expected else name.replace("embed_out", "lm_head")
        assert np.array_equal(array, expected[name].numpy())
