"""The shapes that are measured, with random weights: speed does not depend on their values."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig

Arrays = Mapping[str, NDArray[np.float32]]

SHAPES = {
    "12M": dict(n_layers=6, d_model=384, n_heads=6, d_ff=1024, vocab_size=4096),
    "135M": dict(n_layers=30, d_model=576, n_heads=9, n_kv_heads=3, d_ff=1536, vocab_size=49152),
}


def config_of(shape: str, context_length: int) -> ModelConfig:
    """A llama of this shape, embeddings tied."""
    return ModelConfig.of("llama", **SHAPES[shape], context_length=context_length)


def random_arrays(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Weights by tgen's names, drawn so that numbers keep their size from layer to layer."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        drawn = random.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(columns**-0.5)

    C, D, F = config.d_model, config.head_dim, config.d_ff
    n_q, n_kv = config.n_heads * D, config.n_kv_heads * D
    arrays = {
        "token_embedding.weight": matrix(config.vocab_size, C),
        "final_norm.weight": np.ones(C, np.float32),
    }
    for layer in range(config.n_layers):
        block = {
            "attention_norm.weight": np.ones(C, np.float32),
            "attention.qkv_proj.weight": matrix(n_q + 2 * n_kv, C),
            "attention.o_proj.weight": matrix(C, n_q),
            "feed_forward_norm.weight": np.ones(C, np.float32),
            "feed_forward.gate_proj.weight": matrix(F, C),
            "feed_forward.up_proj.weight": matrix(F, C),
            "feed_forward.down_proj.weight": matrix(C, F),
        }
        arrays |= {f"blocks.{layer}.{name}": array for name, array in block.items()}
    return arrays
