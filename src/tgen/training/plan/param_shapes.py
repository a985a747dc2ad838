"""A model's tensors by shape; none is made, so that the model may be too large for this machine."""

import math
from collections.abc import Iterable

from tgen.config import ModelConfig

Shape = tuple[int, ...]


def outer_tensors(model: ModelConfig) -> list[Shape]:
    """What stands outside the blocks: embeddings, the head where it has its own, the last norm."""
    shapes: list[Shape] = [(model.vocab_size, model.d_model)] * (2 - model.tied_embeddings)
    if model.position == "learned":
        shapes.append((model.context_length, model.d_model))
    return shapes + ([] if model.post_norm else _norm(model))


def block_tensors(model: ModelConfig) -> list[Shape]:
    """What one block holds."""
    width = model.n_heads * model.head_dim
    qkv = width + 2 * model.n_kv_heads * model.head_dim
    n_up = 2 if model.activation == "swiglu" else 1
    shapes: list[Shape] = [(qkv, model.d_model), (model.d_model, width)]
    shapes += [(model.d_ff, model.d_model)] * n_up + [(model.d_model, model.d_ff)]
    shapes += [(qkv,)] * model.attention_bias + [(model.d_model,)] * model.output_bias
    shapes += ([(model.d_ff,)] * n_up + [(model.d_model,)]) * model.feed_forward_bias
    return shapes + [(model.head_dim,)] * (2 * model.qk_norm) + 2 * _norm(model)


def n_parameters(model: ModelConfig) -> int:
    """Every weight, each once."""
    return size(outer_tensors(model)) + model.n_layers * size(block_tensors(model))


def size(shapes: Iterable[Shape], *, n_ranks: int = 1) -> int:
    """Numbers in tensors of these shapes; of those sharded by rows, in the largest rank's share."""
    return sum(-(-shape[0] // n_ranks) * math.prod(shape[1:]) for shape in shapes)


def _norm(model: ModelConfig) -> list[Shape]:
    return [(model.d_model,)] * (1 if model.norm == "rms_norm" else 2)
