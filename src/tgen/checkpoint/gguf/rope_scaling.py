"""Llama 3's RoPE scaling in GGUF: a tensor of frequency divisors, from which it is inferred."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.dtypes import Floats
from tgen.config import RopeScaling
from tgen.errors import ModelError
from tgen.model.rope import scale_frequencies

_PREFIX = "tgen.rope_scaling."
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")
HINT = "use a model with linear, yarn or Llama 3 RoPE scaling"


def compute_divisors(theta: float, head_dim: int, scaling: RopeScaling) -> Floats:
    """Return the divisor of each rotary frequency, (D / 2,)."""
    frequencies = _frequencies(theta, head_dim)
    divisors: Floats = (frequencies / scale_frequencies(frequencies, theta, scaling)).astype(
        np.float32
    )
    return divisors


def scaling_fields(scaling: RopeScaling) -> dict[str, float]:
    """Return the parameters as GGUF fields, which llama.cpp ignores."""
    return {f"{_PREFIX}{name}": float(getattr(scaling, name)) for name in _NUMBERS}


def infer_scaling(theta: float, divisors: Floats, fields: Mapping[str, Any]) -> RopeScaling | None:
    """Return the scaling with these divisors, (D / 2,) float32; None if all are 1.

    Uses tgen's own `fields` if the file has them. Raises ModelError if no Llama 3 scaling has these
    divisors, UsageError for parameters out of range.
    """
    if (divisors == 1).all():
        return None
    match [fields.get(f"{_PREFIX}{name}") for name in _NUMBERS]:
        case [float(factor), float(low), float(high), float(length)] if abs(length) < 1 << 31:
            scaling = RopeScaling(
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=high,
                original_context_length=round(length),
            )
        case _:
            scaling = _infer_standard(theta, divisors)
    with np.errstate(all="ignore"):  # extreme parameters give values that match nothing
        expected = compute_divisors(theta, 2 * len(divisors), scaling)
    if not np.allclose(expected, divisors, rtol=1e-4, atol=0):
        raise ModelError("rope_freqs.weight is not Llama 3's RoPE scaling", HINT)
    return scaling


def _infer_standard(theta: float, divisors: Floats) -> RopeScaling:
    """Assume Llama 3's two frequency factors; the interpolated divisors give the context length."""
    factor = float(str(divisors.max()))
    between = (divisors > 1) & (divisors < divisors.max())
    if not between.any() or not 1 < factor < math.inf:
        raise ModelError("rope_freqs.weight does not determine a RoPE scaling", HINT)
    standard = RopeScaling(factor=factor)
    kept = (1 / divisors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    low, high = standard.low_freq_factor, standard.high_freq_factor
    turns = kept * (high - low) + low
    turns_per_token = _frequencies(theta, 2 * len(divisors))[between] / (2 * math.pi)
    length = float(np.median(turns / turns_per_token))
    return RopeScaling(factor=factor, original_context_length=max(1, round(min(length, 1e9))))


def _frequencies(theta: float, head_dim: int) -> NDArray[np.float64]:
    frequencies: NDArray[np.float64] = 1 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    return frequencies
