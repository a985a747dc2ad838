"""Estimate of the duration of a training step on a CPU.

The speed that `measure_speed` reports is that of a small model, most of whose time goes to
elementwise operations. Larger matrices are multiplied faster. The factors were measured with the
five smallest sizes on two CPUs: their steps take 0.9 to 1.1 times the estimate.
"""

from tgen.config import ModelConfig
from tgen.training.plan.param_shapes import block_matrices, matmul_params

_MATMUL_SPEED = 4.25  # speed of forward and backward, in multiples of the measured speed
_ELEMENTWISE = 8800  # FLOP at the measured speed per token, layer and unit of width
_MUON_SPEED = 5.0  # speed with wide matrices, in multiples of the measured speed
_MUON_WIDTH = 500  # matrices of this width are multiplied half as fast
_MUON_ITERATIONS = 5


def step_seconds(
    model: ModelConfig, step_tokens: int, flops_per_second: float, *, muon: bool
) -> float:
    """Return the seconds of a step of `step_tokens` tokens, evaluations excluded."""
    flops = 6 * matmul_params(model) / _MATMUL_SPEED
    flops += _ELEMENTWISE * model.n_layers * model.d_model
    seconds = step_tokens * flops / flops_per_second
    if muon:
        slowdown = (1 + _MUON_WIDTH / model.d_model) / _MUON_SPEED
        seconds += muon_flops(model) * slowdown / flops_per_second
    return seconds


def muon_flops(model: ModelConfig) -> float:
    """Return the FLOP of the orthogonalization of all matrices of the blocks."""
    total = 0
    for shape in block_matrices(model):
        short, long = sorted(shape)
        total += 4 * short**2 * long + 2 * short**3  # gram, its square, and their product
    return float(_MUON_ITERATIONS * model.n_layers * total)
