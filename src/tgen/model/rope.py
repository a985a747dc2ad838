"""Fixed numbers by position, without torch: every engine has the same."""

import math

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig

Table = NDArray[np.float32]


def sinusoid(context_length: int, d_model: int) -> Table:
    """(context_length, C): sin and cos of p / 10000^(2i/C), interleaved (Vaswani et al. 2017)."""
    position = np.arange(context_length, dtype=np.float64)[:, None]
    angle = position / 10_000.0 ** (np.arange(0, d_model, 2, dtype=np.float64) / d_model)
    both = np.stack([np.sin(angle), np.cos(angle)], axis=-1)
    return both.reshape(context_length, d_model).astype(np.float32)


def rotary_tables(config: ModelConfig, n: int | None = None) -> tuple[Table, Table]:
    """Cosines and sines, (n, D/2), of the first `n` positions, or of the whole context: of the
    angles that turn queries and keys (Su et al. 2021), stretched where a scaling is given; as in
    Llama 3: long wavelengths by `factor`, short ones not at all."""
    D, scaling = config.head_dim, config.rope_scaling
    exponents = np.arange(0, D, 2, dtype=np.float64) / D
    frequencies = (1.0 / config.rope_theta**exponents).astype(np.float32)
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        turns = scaling.original_context_length * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        share = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
        frequencies = frequencies * share + frequencies / scaling.factor * (1 - share)
    positions = np.arange(n or config.context_length, dtype=np.float32)[:, None]
    angles = positions * frequencies.astype(np.float32)
    return np.cos(angles), np.sin(angles)
