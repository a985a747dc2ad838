"""The sampler: logits -> one token a row, in a fixed order: temperature, top-k, top-p, draw.

Nothing here has a state. The random number behind a token is a function of (seed, row, position),
so a row's text depends neither on its neighbours nor on how it was computed.
"""

from collections.abc import Sequence

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Logits
from tgen.errors import ModelError
from tgen.generation.truncation import keep_top_k, keep_top_p, softmax

_DRAW = 0  # the purpose of a random number, its fourth coordinate


def draw(
    logits: Logits, sampling: SamplingConfig, *, rows: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """A token id for each row of logits (B, V); `rows` and `positions` name the random numbers."""
    if not np.isfinite(logits.max(axis=1)).all():
        raise ModelError("the model's logits are not finite", "its weights are damaged")
    if sampling.temperature == 0:
        return [int(i) for i in logits.argmax(axis=1)]  # the lowest id among equals
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scaled = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    scaled = np.maximum(scaled / sampling.temperature, -1e30).astype(np.float32)
    kept = keep_top_p(keep_top_k(scaled, sampling.top_k), sampling.top_p)
    cumulative = np.cumsum(softmax(kept), axis=1)
    tokens = []
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        u = uniform(sampling.seed, row, position, _DRAW) * cumulative[i, -1]
        token = int(np.searchsorted(cumulative[i], u, side="right"))
        tokens.append(min(token, int(np.flatnonzero(kept[i] > -np.inf)[-1])))
    return tokens


def uniform(seed: int, row: int, position: int, purpose: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox, Salmon et al. 2011)."""
    raw = np.random.Philox(key=[seed, purpose], counter=[0, position, row, 0]).random_raw()
    return float(int(raw) >> 11) * 2.0**-53
