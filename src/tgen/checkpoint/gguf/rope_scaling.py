"""Llama 3's stretching of the context in GGUF: a tensor of divisors, from which it is read back.

(Linear stretching is a field there.)
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.dtypes import Floats
from tgen.config import RopeScaling
from tgen.errors import ModelError

_OURS = "tgen.rope_scaling."
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")
ONLY = "tgen knows linear stretching and Llama 3's"


def divisors(theta: float, head_dim: int, scaling: RopeScaling) -> Floats:
    """(D / 2,): what each rotary frequency is divided by."""
    turns = scaling.original_context_length * _turns_a_token(theta, head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: turns so often that it stays
    return (1 / ((1 - kept) / scaling.factor + kept)).astype(np.float32)


def fields(scaling: RopeScaling) -> dict[str, float]:
    """The numbers themselves, under names that llama.cpp passes over."""
    return {f"{_OURS}{name}": float(getattr(scaling, name)) for name in _NUMBERS}


def read(theta: float, found: Floats, known: Mapping[str, Any]) -> RopeScaling | None:
    """The stretching that has these divisors, (D / 2,) float32; None where they are all 1.

    `known`: the file's fields, which may be ours. Raises ModelError if no stretching like Llama 3's
    has the divisors, UsageError for numbers that are out of range.
    """
    if (found == 1).all():
        return None
    numbers = [known.get(f"{_OURS}{name}") for name in _NUMBERS]
    match numbers:
        case [float(factor), float(low), float(high), float(length)] if abs(length) < 1 << 31:
            scaling = RopeScaling(
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=high,
                original_context_length=round(length),
            )
        case _:
            scaling = _derive(theta, found)
    with np.errstate(all="ignore"):  # of wild numbers come others that are like none
        again = divisors(theta, 2 * len(found), scaling)
    if not np.allclose(again, found, rtol=1e-4, atol=0):
        raise ModelError("rope_freqs.weight does not stretch as Llama 3 does", ONLY)
    return scaling


def _derive(theta: float, found: Floats) -> RopeScaling:
    """With Llama 3's two borders, and the original context as the divisors between show it."""
    factor = float(str(found.max()))
    between = (found > 1) & (found < found.max())
    if not between.any() or not 1 < factor < math.inf:
        raise ModelError("rope_freqs.weight does not show how it stretches", ONLY)
    kept = (1 / found[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    standard = RopeScaling(factor=factor)
    low, high = standard.low_freq_factor, standard.high_freq_factor
    turns = kept * (high - low) + low
    length = float(np.median(turns / _turns_a_token(theta, 2 * len(found))[between]))
    return RopeScaling(factor=factor, original_context_length=max(1, round(min(length, 1e9))))


def _turns_a_token(theta: float, head_dim: int) -> NDArray[np.float64]:
    exponents = np.arange(0, head_dim, 2) / head_dim
    turns: NDArray[np.float64] = 1 / (2 * math.pi * theta**exponents)
    return turns
