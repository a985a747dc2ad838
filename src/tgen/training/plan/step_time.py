"""Estimate of the duration of a training step on a CPU.

The speed that `measure_speed` reports is that of a small model, most of whose time goes to
elementwise operations. Larger matrices are multiplied faster. The constants were measured with the
five smallest sizes on two CPUs with AMX, in windows of 128 tokens (small and medium: 256) and with
torch's fused attention: the steps took 0.93 to 1.05 times the estimate. On an AMD EPYC, with
windows of 512 tokens for small and medium and attention in chunks, it is 0.8 to 1.1 times.
"""

from typing import NamedTuple

from tgen.config import ModelConfig
from tgen.config.training import Precision
from tgen.training.plan.param_shapes import block_matrices, matmul_params

_MUON_ITERATIONS = 5
_SHORT_CONTEXT = 256  # tokens; up to there, the elementwise cost includes attention
# FLOP at the measured speed per pair of tokens, layer and unit of width: six are needed, which
# run slower. From one measurement: a step of one window of 4,000 tokens.
_ATTENTION = 10


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
    return float(_MUON_ITERATIONS * model.n_layers * total)
