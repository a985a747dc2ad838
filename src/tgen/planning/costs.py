"""Shapes and numbers of a model's parameters, and the CPU time of a training step that follows.

No parameter is allocated. The speed that `measure_speed` reports is that of a small model, most of
whose time goes to elementwise operations. Larger matrices are multiplied faster. The constants of
the estimate were measured with the five smallest sizes on two CPUs with AMX, in windows of 128
tokens (small and medium: 256) and with torch's fused attention: the steps took 0.93 to 1.05 times
the estimate. On an AMD EPYC, with windows of 512 tokens for small and medium and attention in
chunks, it is 0.8 to 1.1 times.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from tgen.config import ModelConfig
from tgen.config.training import Precision

TensorShape = tuple[int, ...]
MUON_ITERATIONS = 5  # of Newton and Schulz, see `training.optimizers`
_SHORT_CONTEXT = 256  # tokens; up to there, the elementwise cost includes attention
# FLOP at the measured speed per pair of tokens, layer and unit of width: six are needed, which
# run slower. From one measurement: a step of one window of 4,000 tokens.
_ATTENTION = 10


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
    shapes += [(model.vocab_size,)] * model.head_bias
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
    n_norms = {"sandwich": 4, "shared": 1}.get(model.norm_placement, 2)
    return shapes + n_norms * _norm(model)


def block_matrices(model: ModelConfig) -> list[TensorShape]:
    """Return the tensors of one block that Muon updates."""
    return [shape for shape in block_shapes(model) if len(shape) == 2]


def n_parameters(model: ModelConfig) -> int:
    """Return the number of parameters; tied ones count once."""
    return n_elements(outer_shapes(model)) + model.n_layers * n_elements(block_shapes(model))


def matmul_params(model: ModelConfig) -> int:
    """Return the parameters that each token is multiplied with: the blocks' matrices and head."""
    return model.n_layers * n_elements(block_matrices(model)) + model.vocab_size * model.d_model


def flops_per_token(model: ModelConfig, *, frozen: bool = False) -> int:
    """Return the FLOP that training needs per token, forward and backward; `frozen` weights, those
    below an adapter, need no gradients."""
    n = model.context_length
    windows = (min(model.window(layer) or n, n) for layer in range(model.n_layers))
    keys = sum(window * (2 * n - window) for window in windows)  # 2 n times those of a mean query
    attention = 12 * model.n_heads * model.head_dim * keys // (2 * n)
    return (4 if frozen else 6) * matmul_params(model) + attention


def n_elements(shapes: Iterable[TensorShape], *, n_ranks: int = 1) -> int:
    """Return the elements of all tensors or, sharded by rows, those of the largest shard."""
    return sum(-(-shape[0] // n_ranks) * math.prod(shape[1:]) for shape in shapes)


def _norm(model: ModelConfig) -> list[TensorShape]:
    n = {"none": 0, "weight": 1, "all": 1 if model.norm == "rms_norm" else 2}
    return [(model.d_model,)] * n[model.norm_parameters]


class MeasuredStep(NamedTuple):
    """The measured duration of a step of `n_tokens` tokens."""

    n_tokens: int
    seconds: float
    muon_seconds: float  # part that does not depend on the number of tokens

    def seconds_of(self, n_tokens: int, *, muon: bool = True) -> float:
        """Return the seconds of a step of `n_tokens` tokens, with Muon's or without."""
        rest = (self.seconds - self.muon_seconds) * n_tokens / self.n_tokens
        return rest + self.muon_seconds * muon


class _Costs(NamedTuple):
    """Costs of a step, relative to the speed measured in the same precision."""

    matmul_speed: float  # of forward and backward, in multiples of the measured speed
    muon_speed: float
    elementwise: float  # FLOP at the measured speed per token, layer and unit of width
    per_layer: float  # FLOP at the measured speed per step and layer, however few the tokens


_COSTS: dict[Precision, _Costs] = {
    "float32": _Costs(2.1, 2.3, 6400, 3.2e8),
    "bfloat16": _Costs(4.1, 5.6, 7000, 5.3e8),
}


def step_seconds(
    model: ModelConfig,
    step_tokens: int,
    flops_per_second: float,
    *,
    precision: Precision = "float32",
    context: int,
    muon: bool,
    work: float = 1.0,
) -> float:
    """Return the seconds of a step of `step_tokens` tokens in windows of `context`, evaluations
    excluded.

    `work` is the share of a full step's products.
    """
    costs = _COSTS[precision]
    flops = work * 6 * matmul_params(model) / costs.matmul_speed
    attention = _ATTENTION * max(0, context - _SHORT_CONTEXT)
    flops += (costs.elementwise + attention) * model.n_layers * model.d_model
    total = step_tokens * flops + costs.per_layer * (model.n_layers + 1)
    if muon:
        total += muon_flops(model) / costs.muon_speed
    return total / flops_per_second


def muon_flops(model: ModelConfig) -> float:
    """Return the FLOP of the orthogonalization of all matrices of the blocks."""
    total = 0
    for shape in block_matrices(model):
        short, long = sorted(shape)
        total += 4 * short**2 * long + 2 * short**3  # gram, its square, and their product
    return float(MUON_ITERATIONS * model.n_layers * total)
