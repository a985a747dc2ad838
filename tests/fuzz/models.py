"""The smallest models that tgen writes, one per family, and what commands do with a model."""

from pathlib import Path
from typing import Any

import numpy as np

from support.models import EQUAL_HEADS
from tgen.checkpoint import model_dir
from tgen.checkpoint.hf.tensor_names import from_hf_arrays, tensor_mappings
from tgen.checkpoint.model_lookup import find_model
from tgen.config import EngineOptions, ModelConfig, SamplingConfig
from tgen.loaded_model import LoadedModel, open_model
from tgen.tokenizer import Tokenizer, train_char

TOKENIZER = train_char(["é".encode()])


def random_arrays(config: ModelConfig) -> dict[str, Any]:
    """Return random weights by tgen's names."""
    rng = np.random.default_rng(0)
    stored = {
        name: rng.normal(size=shape).astype(np.float32)
        for mapping in tensor_mappings(config)
        for name, shape in zip(mapping.theirs, mapping.shapes, strict=True)
    }
    return from_hf_arrays(config, stored)


def make_config(family: str, **values: Any) -> ModelConfig:
    """Return the configuration of a model with 8 to 10 KB of weights."""
    shape = {"vocab_size": TOKENIZER.vocab_size, "context_length": 16, "n_layers": 1, "d_model": 4}
    shape |= {"n_heads": 2}
    if family not in ("classic", "gpt2"):
        shape["d_ff"] = 8
    if family not in EQUAL_HEADS:
        shape["n_kv_heads"] = 1
    if family in ("mistral", "phi3", "gpt_neo", "gemma3", "olmo3", "cohere2", "exaone4"):
        shape["sliding_window"] = 8
    if family == "gemma3":
        shape["local_rope_theta"] = 100
    return ModelConfig.of(family, **shape | values)


def save_model(
    path: Path, family: str, *, tokenizer: Tokenizer = TOKENIZER, **values: Any
) -> ModelConfig:
    """Write a model directory."""
    config = make_config(family, **{"vocab_size": tokenizer.vocab_size} | values)
    model_dir.save(path, config, tokenizer, random_arrays(config))
    return config


def use_model(path: Path) -> LoadedModel:
    """Load a model as `tgen generate` does, and generate a token."""
    model = open_model(find_model(str(path)).path, EngineOptions(device="cpu", threads=1))
    sampling = SamplingConfig(**model.defaults | {"max_new_tokens": 1})
    for _ in model.tokens([model.encode(b"a \xff\xc3\xa9\n")], sampling=sampling):
        pass
    return model
