"""What tgen writes, opened by transformers: this one's version, and 4.57 by scripts/interop."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support.models import ALL_FAMILIES, TEXT, make_model
from tgen.api import load
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import RopeScaling, SamplingConfig
from tgen.model.transformer import Transformer
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


@pytest.fixture
def warnings_of_theirs() -> Iterator[list[str]]:
    """What transformers says at the level of a warning or above."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def opened(path: Path, said: list[str]):
    """The model and its tokenizer, from files that leave nothing to be said."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    assert transformers.GenerationConfig.from_pretrained(path).eos_token_id == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert not said
    return model.eval(), tokenizer


def assert_same(path: Path, said: list[str]) -> None:
    """Ids, text, logits and what greedy decoding makes of a prompt."""
    (theirs, tokenizer), ours = opened(path, said), load(path, device="cpu", threads=1)
    ids = ours.tokenizer.encode(MIXED.encode())
    if ours.bundle.config.family != "qwen2":  # version 5 reads it as Qwen's own tokenizer, always
        assert tokenizer.encode(MIXED) == tokenizer.encode(MIXED, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == MIXED
    prompt = ids[: ours.engine.context_length // 2]
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt])).logits[0].numpy()
        in_double = theirs.double()(torch.tensor([prompt])).logits[0]
        theirs.float()
        model = Transformer.from_arrays(ours.bundle.config, model_dir.load(path).arrays).double()
        assert (model(torch.tensor([prompt]))[0] - in_double).abs().max() <= 1e-5
    (wanted,) = ours.engine.extend([prompt], every_position=True)
    # Logits of 20 come out of their own two kernels 1.5e-5 apart.
    assert np.abs(wanted - logits).max() <= 1e-5 * max(1, np.abs(logits).max())
    n = ours.engine.context_length - len(prompt)
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
    ended = text[0, len(prompt) :].tolist()
    assert ended[: len(generated)] == generated
    assert set(ended[len(generated) :]) <= {0}  # where we stop, they show the end as well


@pytest.mark.parametrize("train", [train_char, train_bpe], ids=["char", "bpe"])
@pytest.mark.parametrize(("family", "values"), VARIANTS)
def test_written_equals_opened(family, values, train, tmp_path, warnings_of_theirs):
    tokenizer: Tokenizer = train([TEXT])
    model = make_model(family, vocab_size=tokenizer.vocab_size, context_length=128, **values)
    model_dir.save(tmp_path, model.config, tokenizer, model.to_arrays())
    assert_same(tmp_path, warnings_of_theirs)


def test_trained_equals_opened(trained, warnings_of_theirs):
    assert_same(trained, warnings_of_theirs)


def test_shipped_equals_opened(warnings_of_theirs):
    assert_same(shipped_model(), warnings_of_theirs)


def test_converted_equals_opened(family, tokenizer, tmp_path):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", model.config, tokenizer, model.to_arrays())
    ours = load(tmp_path / "m", device="cpu", threads=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    converted = ours.to_transformers()
    wanted = theirs.state_dict()
    found = converted.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert converted.config.eos_token_id == theirs.config.eos_token_id == 0
    arrays, tensors = ours.weights(), ours.weights("torch")
    assert arrays.keys() == tensors.keys()
    for name, array in arrays.items():
        assert np.array_equal(array, tensors[name].numpy())
        assert np.array_equal(array, wanted[name].numpy())
