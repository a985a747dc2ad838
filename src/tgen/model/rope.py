"""Position tables of RoPE and of sinusoidal embeddings, in numpy: every engine uses the same."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig, Rope, RopeScaling

Table = NDArray[np.float32]


def sinusoid(n: int, d_model: int) -> Table:
    """(n, C): sin and cos of p / 10000^(2i/C), interleaved (Vaswani et al. 2017), for the first `n`
    positions."""
    position = np.arange(n, dtype=np.float64)[:, None]
    angle = position / 10_000.0 ** (np.arange(0, d_model, 2, dtype=np.float64) / d_model)
    table = np.empty((n, d_model), np.float32)
    np.sin(angle, out=table[:, 0::2])
    np.cos(angle, out=table[:, 1::2])
    return table


def rotary_tables(
    config: ModelConfig, n: int | None = None, rope: Rope = "global"
) -> tuple[Table, Table]:
    """Return the cosines and sines (n, n_rotated / 2) of RoPE (Su et al. 2021) for the first `n`
    positions, by default the whole context.

    The local rope has frequencies of its own, without scaling.
    """
    exponents = np.arange(0, config.n_rotated, 2, dtype=np.float64) / config.n_rotated
    theta = config.rope_theta if rope == "global" else config.local_rope_theta
    assert theta is not None
    frequencies = (1.0 / theta**exponents).astype(np.float32)
    factor = np.float32(1)
    if rope == "global" and (scaling := config.rope_scaling):
        frequencies = scale_frequencies(frequencies, theta, scaling)
        if scaling.kind in ("yarn", "longrope"):
            factor = np.float32(scaling.attention_factor)
    positions = np.arange(n or config.context_length, dtype=np.float32)[:, None]
    angles = positions * frequencies.astype(np.float32)
    return np.cos(angles) * factor, np.sin(angles) * factor


def scale_frequencies(
    frequencies: NDArray[Any], theta: float, scaling: RopeScaling
) -> NDArray[Any]:
    """Return the frequencies (n,) with RoPE scaling: see `RopeScaling`."""
    scaled: NDArray[Any] = frequencies / scaling.factor
    match scaling.kind:
        case "linear":
            return scaled
        case "longrope":
            return np.asarray(frequencies / np.array(scaling.short_factor, np.float32))
        case "dynamic":
            return frequencies
        case "llama3":
            unscaled = _llama3_unscaled_fraction(frequencies, scaling)
        case "yarn":
            unscaled = _yarn_unscaled_fraction(len(frequencies), theta, scaling)
    return np.asarray(frequencies * unscaled + scaled * (1 - unscaled))


def _yarn_unscaled_fraction(n: int, theta: float, scaling: RopeScaling) -> NDArray[Any]:
    """Return the fraction, (n,), of each frequency that YaRN leaves unscaled (Peng et al. 2023).

    It falls from 1 to 0 between the frequencies that turn `beta_fast` and `beta_slow` times within
    the original context length.
    """

    def index(turns: float) -> float:
        ratio = scaling.original_context_length / (turns * 2 * math.pi)
        return n * math.log(ratio) / math.log(theta)

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * n - 1)
    high += 0.001 if low == high else 0
    return np.asarray(1 - np.clip((np.arange(n) - low) / (high - low), 0, 1))


def _llama3_unscaled_fraction(frequencies: NDArray[Any], scaling: RopeScaling) -> NDArray[Any]:
    """Return the fraction, (D/2,), of each frequency that Llama 3's RoPE scaling leaves unscaled.

    It depends on the number of turns within the original context length.
    """
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((turns - low) / (high - low), 0, 1)
