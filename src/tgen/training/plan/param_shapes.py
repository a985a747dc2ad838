"""Shapes and numbers of a model's parameters, without allocating any."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from tgen.config import ModelConfig

TensorShape = tuple[int, ...]


class FrozenModel(NamedTuple):
    """The base model of an adapter in memory, and the parameters that are trained."""

    n_bytes: int  # of the base, as stored
    largest_matrix: int  # bytes to widen the largest matrix to float32; 0: all are float32
    adapter: tuple[tuple[int, int], ...]  # shapes of the adapter's parameters


def outer_shapes(model: ModelConfig) -> list[TensorShape]:
    """Return the tensors outside the blocks: embeddings, an untied head, the last norm."""
    shapes: list[TensorShape] = [(model.vocab_size, model.d_model)] * (2 - model.tied_embeddings)
    if model.position == "learned":
        shapes.append((model.context_length, model.d_model))
    return shapes + ([] if model.post_norm else _norm(model))


def block_shapes(model: ModelConfig) -> list[TensorShape]:
    """Return the tensors of one block."""
    width = model.n_heads * model.head_dim
    qkv = width + 2 * model.n_kv_heads * model.head_dim
    n_up = 2 if model.gated else 1
    shapes: list[TensorShape] = [(qkv, model.d_model), (model.d_model, width)]
    shapes += [(model.d_ff, model.d_model)] * n_up + [(model.d_model, model.d_ff)]
    shapes += [(qkv,)] * model.attention_bias + [(model.d_model,)] * model.output_bias
    shapes += ([(model.d_ff,)] * n_up + [(model.d_model,)]) * model.feed_forward_bias
    if model.qk_norm:
        n_heads = (model.n_heads, model.n_kv_heads) if model.qk_norm_over_heads else (1, 1)
        shapes += [(n * model.head_dim,) for n in n_heads]
    return shapes + (4 if model.norm_placement == "sandwich" else 2) * _norm(model)


def block_matrices(model: ModelConfig) -> list[TensorShape]:
    """Return the tensors of one block that Muon updates."""
    return [shape for shape in block_shapes(model) if len(shape) == 2]


def n_parameters(model: ModelConfig) -> int:
    """Return the number of parameters; tied ones count once."""
    return n_elements(outer_shapes(model)) + model.n_layers * n_elements(block_shapes(model))


def matmul_params(model: ModelConfig) -> int:
    """Return the parameters that each token is multiplied with: the blocks' matrices and head."""
    return model.n_layers * n_elements(block_matrices(model)) + model.vocab_size * model.d_model


def flops_per_token(model: ModelConfig) -> int:
    """Return the FLOP that training needs per token, forward and backward."""
    n = model.context_length
    windows = (min(model.window(layer) or n, n) for layer in range(model.n_layers))
    keys = sum(window * (2 * n - window) for window in windows)  # 2 n times those of a mean query
    attention = 12 * model.n_heads * model.head_dim * keys // (2 * n)
    return 6 * matmul_params(model) + attention


def n_elements(shapes: Iterable[TensorShape], *, n_ranks: int = 1) -> int:
    """Return the elements of all tensors or, sharded by rows, those of the largest shard."""
    return sum(-(-shape[0] // n_ranks) * math.prod(shape[1:]) for shape in shapes)


def _norm(model: ModelConfig) -> list[TensorShape]:
    return [(model.d_model,)] * (1 if model.norm == "rms_norm" else 2)
