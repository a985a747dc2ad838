"""How far the bits per byte of a held-out text may be trusted: a small text is a small sample."""

import math

import numpy as np
from numpy.typing import ArrayLike


def bits_per_byte_error(nats: ArrayLike, n_bytes: ArrayLike) -> float:
    """The standard error of sum(nats) / ln 2 / sum(n_bytes), infinite for fewer than two windows.

    Both are (n,): what each held-out window costs, summed, and how many bytes it holds. Windows
    count as independent samples of a ratio (Cochran 1977, Sampling Techniques, section 2.11).
    """
    costs = np.asarray(nats, np.float64) / math.log(2)
    sizes = np.asarray(n_bytes, np.float64)
    n = len(costs)
    if n < 2:
        return math.inf
    residuals = costs - costs.sum() / sizes.sum() * sizes
    return float(np.sqrt(n / (n - 1) * (residuals @ residuals)) / sizes.sum())
