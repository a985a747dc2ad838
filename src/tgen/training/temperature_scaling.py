"""Temperature scaling: a factor of the logits that lowers the validation loss; in saved weights, a
factor of the final norm."""

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from tgen.config import ModelConfig

_MAX_SCALE_STEP = 1.25  # of the logits, from one evaluation to the next


def next_scale(scale: float, first: float, second: float) -> float:
    """Return a scale closer to the minimum of the loss, a convex function of the scale, from its
    derivatives."""
    if not (math.isfinite(first) and second > 0):
        return scale
    low, high = scale / _MAX_SCALE_STEP, scale * _MAX_SCALE_STEP
    return float(min(max(scale - first / second, low), high))


def scale_logits(
    weights: Mapping[str, NDArray[Any]], config: ModelConfig, scale: float
) -> dict[str, NDArray[Any]]:
    """Return weights with which the logits are `scale` times as large: the final norm, in whose
    output the logits are linear, is multiplied. `weights` may be empty."""
    scaled = {**weights}
    if weights and scale != 1:
        one = 1 if config.norm_adds_one else 0  # a norm that adds one multiplies by 1 + weight
        scaled["final_norm.weight"] = (weights["final_norm.weight"] + one) * scale - one
        for name in weights.keys() & {"final_norm.bias", "lm_head.bias"}:
            scaled[name] = weights[name] * scale
    return scaled
