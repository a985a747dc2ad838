"""Small random models of each family, and the corpus of the tests."""

import torch

from support.families import DISTINCT
from tgen.checkpoint.dtypes import Array
from tgen.config import CacheDtype, ModelConfig, StoredAs
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.cpu.weights import pack_weights
from tgen.model.transformer import Transformer

TEXT = (
    "The king said: what is this? 'Tis naïve, 日本 🦋 and more.\n\nWhat is a crown?\n" * 40
).encode()
ALL_FAMILIES = DISTINCT
# Positions of all kinds, with and without a window, in all layers and in some.
DIFFERENT_POSITIONS = ["classic", "gpt2", "mistral", "qwen3", "gemma3"]
# What makes a small model of a family differ from others where its defaults do not.
VARIED: dict[str, dict[str, object]] = {
    "gpt_neo": {"sliding_window": 9, "sliding_layers": (False, True)},
    "gpt_neox": {"rotary_dim": 4},
    "mistral": {"sliding_window": 20},
    "phi3": {"sliding_window": 20, "rotary_dim": 6},
    "gemma3": {
        "head_dim": 16,
        "local_rope_theta": 100.0,
        "attention_scale": 20**-0.5,
        "sliding_window": 9,
        "sliding_layers": (True, False),
    },
    "smollm3": {"rope_layers": (True, False)},
    "granite": {
        "embedding_scale": 3.0,
        "attention_scale": 0.4,
        "residual_scale": 0.7,
        "logits_divisor": 5.0,
    },
    "starcoder2": {"sliding_window": 20},
    "olmo3": {
        "local_rope_theta": 100.0,
        "sliding_window": 9,
        "sliding_layers": (True, False),
    },
    "phi": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_bigcode": {"n_kv_heads": 1},
    "stablelm": {"rotary_dim": 4, "norm_placement": "shared"},
    "cohere": {"logits_divisor": 5.0},
    "cohere2": {
        "logits_divisor": 4.0,
        "sliding_window": 9,
        "sliding_layers": (True, False),
    },
    "glm4": {"rotary_dim": 4},
    "exaone4": {"sliding_window": 9, "sliding_layers": (True, False)},
}
# Families that have as many heads of keys and values as of queries.
EQUAL_HEADS = ("classic", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt")


def make_model(family: str, *, seed: int = 0, **values: object) -> Transformer:
    """Make a small random model whose weights are large enough for every part to matter."""
    shape = {"vocab_size": 300, "n_layers": 2, "d_model": 32, "n_heads": 4, "context_length": 48}
    if family not in EQUAL_HEADS:
        shape["n_kv_heads"] = 2
    config = ModelConfig.of(family, **shape | VARIED.get(family, {}) | values)
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def cpu_engine(
    config: ModelConfig,
    arrays: dict[str, Array],
    *,
    n_threads: int,
    dtype: StoredAs = "float32",
    cache_dtype: CacheDtype | None = None,
) -> CpuEngine:
    """Pack arrays, which are moved out of `arrays`, and open an engine with them."""
    weights = pack_weights(config, arrays, dtype, n_threads=n_threads)
    return CpuEngine(weights, n_threads=n_threads, cache_dtype=cache_dtype)
