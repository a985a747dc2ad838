"""A model with an adapter shares the memory of its base, and computes what it computes alone."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from support.adapters import save_adapter
from support.models import make_model
from tgen.checkpoint import model_dir
from tgen.config import EngineOptions
from tgen.loaded_model import open_model

TOKENS = [[5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"dtype": "int4"}),
        ("gpt2", {"dtype": "float32"}),  # positions that were learnt, and biases
        ("stablelm", {"dtype": "int8"}),  # two norms with the same weights
        ("llama", {"kind": "torch"}),
    ],
    ids=str,
)
def test_equal_weights_are_shared(tmp_path, tokenizer, family, options: dict[str, Any]):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "base", model.config, tokenizer, model.to_arrays())
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base")
    how = EngineOptions(device="cpu", threads=1, **options)
    base = open_model(tmp_path / "base", how).engine
    alone = open_model(tmp_path / "base", how, adapter=adapter).engine
    shared = open_model(tmp_path / "base", how, adapter=adapter).engine
    expected, of_base = (engine.clone().extend(TOKENS) for engine in (alone, base))
    shared.share_weights(base)
    assert 0 < shared.weight_bytes < 0.85 * alone.weight_bytes
    assert base.weight_bytes == alone.weight_bytes
    kept = weakref.ref(base)
    del base  # the shared weights stay
    gc.collect()
    assert kept() is None
    assert np.array_equal(shared.clone().extend(TOKENS), expected)
    assert not np.array_equal(of_base, expected)


def test_models_of_different_shapes_share_nothing(tmp_path, tokenizer):
    engines = []
    for name, width in (("a", 32), ("b", 64)):
        model = make_model("llama", vocab_size=tokenizer.vocab_size, d_model=width)
        model_dir.save(tmp_path / name, model.config, tokenizer, model.to_arrays())
        engines.append(open_model(tmp_path / name, EngineOptions(device="cpu", threads=1)).engine)
    before = engines[1].weight_bytes
    engines[1].share_weights(engines[0])
    assert engines[1].weight_bytes == before


def test_the_memory_of_shared_weights_is_freed(tmp_path, tokenizer):
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "base", model.config, tokenizer, model.to_arrays())
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base")
    how = EngineOptions(device="cpu", threads=1)
    base, tuned = (open_model(tmp_path / "base", how, adapter=one) for one in (None, adapter))
    engine: Any = tuned.engine
    owners = [weakref.ref(array.base) for array in engine.weights._arrays]
    engine.share_weights(base.engine)
    gc.collect()
    assert sum(owner() is None for owner in owners) > 5
