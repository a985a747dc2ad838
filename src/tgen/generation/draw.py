"""The sampler: logits -> one token a row, in a fixed order: top-k, temperature, top-p, draw.

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
    best = logits.argmax(axis=1)  # the lowest id among equals; of NaN where there is one
    if not np.isfinite(logits[np.arange(len(logits)), best]).all():
        raise ModelError("the model's logits are not finite", "its weights are damaged")
    if sampling.temperature == 0:
        return best.tolist()  # type: ignore[no-any-return]
    kept = keep_top_k(logits, sampling.top_k)  # first, on few numbers the rest is quick
    tokens = []
    for logit_row, row, position in zip(kept, rows, positions, strict=True):
        ids = np.flatnonzero(logit_row > -np.inf)
        # Subtracting the maximum first keeps a tiny temperature from overflowing.
        scaled = logit_row[ids].astype(np.float64) - logit_row.max()
        scaled = np.maximum(scaled / sampling.temperature, -1e30)[None].astype(np.float32)
        cumulative = np.cumsum(softmax(keep_top_p(scaled, sampling.top_p))[0])
        u = uniform(sampling.seed, row, position, _DRAW) * cumulative[-1]
        place = int(np.searchsorted(cumulative, u, side="right"))
        tokens.append(int(ids[min(place, len(ids) - 1)]))
    return tokens


def uniform(seed: int, row: int, position: int, purpose: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox, Salmon et al. 2011)."""
    raw = np.random.Philox(key=[seed, purpose], counter=[0, position, row, 0]).random_raw()
    return float(int(raw) >> 11) * 2.0**-53
