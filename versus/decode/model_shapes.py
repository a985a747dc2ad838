"""Model shapes with random weights: speed does not depend on the values."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tgen
from tgen.checkpoint import model_dir, model_files
from tgen.config import ModelConfig
from tgen.tokenizer import train_bpe

SHAPES: dict[str, dict[str, int]] = {
    "tiny": dict(n_layers=2, d_model=64, n_heads=2, d_ff=128, vocab_size=512),
    "12M": dict(n_layers=6, d_model=384, n_heads=6, d_ff=1024, vocab_size=4096),
    "135M": dict(n_layers=30, d_model=576, n_heads=9, n_kv_heads=3, d_ff=1536, vocab_size=49152),
    "1.1B": dict(n_layers=22, d_model=2048, n_heads=32, n_kv_heads=4, d_ff=5632, vocab_size=32000),
}


def make_config(shape: str, context_length: int) -> ModelConfig:
    """Return a llama configuration of this shape with tied embeddings."""
    values: dict[str, Any] = {**SHAPES[shape]}
    return ModelConfig.of("llama", **values, context_length=context_length)


def make_arrays(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Return random weights by tgen's names, scaled to preserve the size of activations."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(columns**-0.5)

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


def write_model(shape: str, path: Path, *, context_length: int = 2048) -> int:
    """Write a model directory and return the bytes of its weights.

    The tokenizer is trained on tgen's own sources.
    """
    sources = [file.read_bytes() for file in sorted(Path(tgen.__file__).parent.rglob("*.py"))]
    tokenizer = train_bpe(sources, vocab_size=min(4096, SHAPES[shape]["vocab_size"]))
    config = make_config(shape, context_length)
    model_dir.save(path, config, tokenizer, make_arrays(config))
    return (path / model_files.WEIGHTS).stat().st_size
