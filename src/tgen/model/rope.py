"""Position tables of RoPE and of sinusoidal embeddings, in numpy: every engine uses the same."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig, RopeScaling

Table = NDArray[np.float32]


def sinusoid(n: int, d_model: int) -> Table:
    """(n, C): sin and cos of p / 10000^(2i/C), interleaved (Vaswani et al. 2017), for the first `n`
    positions."""
    position = np.arange(n, dtype=np.float64)[:, None]
    angle = position / 10_000.0 ** (np.arange(0, d_model, 2, dtype=np.float64) / d_model)
    both = np.stack([np.sin(angle), np.cos(angle)], axis=-1)
    return both.reshape(n, d_model).astype(np.float32)


def rotary_tables(config: ModelConfig, n: int | None = None) -> tuple[Table, Table]:
    """Return the cosines and sines (n, D/2) of RoPE (Su et al. 2021) for the first `n` positions,
    by default the whole context.

    RoPE scaling divides the frequencies by `factor`: all of them (linear), or, as in Llama 3, only
    those with long wavelengths, with a smooth transition to those that stay unchanged.
    """
    D, scaling = config.head_dim, config.rope_scaling
    exponents = np.arange(0, D, 2, dtype=np.float64) / D
    frequencies = (1.0 / config.rope_theta**exponents).astype(np.float32)
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        unscaled = llama3_unscaled_fraction(frequencies, scaling)
        frequencies = frequencies * unscaled + frequencies / scaling.factor * (1 - unscaled)
    positions = np.arange(n or config.context_length, dtype=np.float32)[:, None]
    angles = positions * frequencies.astype(np.float32)
    return np.cos(angles), np.sin(angles)


def llama3_unscaled_fraction(frequencies: NDArray[Any], scaling: RopeScaling) -> NDArray[Any]:
    """Return the fraction, (D/2,), of each frequency that Llama 3's RoPE scaling leaves unscaled.

    It depends on the number of turns within the original context length.
    """
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((turns - low) / (high - low), 0, 1)
