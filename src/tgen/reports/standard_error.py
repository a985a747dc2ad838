"""The standard error of a loss in bits per byte, for validation and scores."""

import math

import numpy as np
from numpy.typing import ArrayLike


def bits_per_byte_error(nats: ArrayLike, n_bytes: ArrayLike) -> float:
    """Return the standard error of sum(nats) / ln 2 / sum(n_bytes), infinite below two parts.

    Both are (n,): the loss and the bytes of each part of a text, such as a window or a document.
    Parts count as independent samples of a ratio (Cochran 1977, Sampling Techniques, 2.11).
    """
    costs = np.asarray(nats, np.float64) / math.log(2)
    sizes = np.asarray(n_bytes, np.float64)
    n = len(costs)
    if n < 2:
        return math.inf
    residuals = costs - costs.sum() / sizes.sum() * sizes
    return float(np.sqrt(n / (n - 1) * (residuals @ residuals)) / sizes.sum())
