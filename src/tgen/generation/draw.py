"""The sampler: logits -> one token a row, by the samplers in their order and the draw.

Nothing here has a state. The random number behind a token is a function of (seed, row, position),
so a row's text depends neither on its neighbours nor on how it was computed.
"""

from collections.abc import Sequence

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Logits
from tgen.errors import ModelError
from tgen.generation import truncation
from tgen.generation.truncation import Ranked

_DRAW, _EXCLUDE = 0, 1  # the purpose of a random number, its fourth coordinate


def draw(
    logits: Logits,
    sampling: SamplingConfig,
    *,
    rows: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """A token id for each row of logits (B, V); `rows` and `positions` name the random numbers."""
    best = logits.argmax(axis=1)  # the lowest id among equals; of NaN where there is one
    if not np.isfinite(logits[np.arange(len(logits)), best]).all():
        raise ModelError("the model's logits are not finite", "its weights are damaged")
    if sampling.temperature == 0 and not sampling.xtc_probability:
        return best.tolist()  # type: ignore[no-any-return]
    active = [name for name in sampling.samplers if name != "top_n_sigma" or sampling.top_n_sigma]
    first_k = sampling.top_k if active[:1] == ["top_k"] else 0
    ids, ranked = truncation.rank(logits, first_k)
    for name in sampling.samplers:
        ranked = _apply(name, ranked, sampling, rows, positions)
    cumulative = np.cumsum(truncation.softmax(ranked), axis=1)
    u = _uniforms(sampling.seed, rows, positions, _DRAW)[:, None]
    places = (cumulative <= u * cumulative[:, -1:]).sum(axis=1)
    # Rounding may lead past the last candidate that can be drawn.
    last = ranked.shape[1] - 1 - (ranked[:, ::-1] > -np.inf).argmax(axis=1)
    return [int(i) for i in ids[np.arange(len(ids)), np.minimum(places, last)]]


def uniform(seed: int, row: int, position: int, purpose: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox, Salmon et al. 2011)."""
    raw = np.random.Philox(key=[seed, purpose], counter=[0, position, row, 0]).random_raw()
    return float(int(raw) >> 11) * 2.0**-53


def _uniforms(
    seed: int, rows: Sequence[int], positions: Sequence[int], purpose: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    pairs = zip(rows, positions, strict=True)
    return np.array([uniform(seed, row, position, purpose) for row, position in pairs])


def _apply(
    name: str,
    ranked: Ranked,
    sampling: SamplingConfig,
    rows: Sequence[int],
    positions: Sequence[int],
) -> Ranked:
    """One sampler, if it is on."""
    if name == "temperature":
        return truncation.temper(ranked, sampling.temperature)
    if name == "top_k" and sampling.top_k:
        return truncation.top_k(ranked, sampling.top_k)
    if name == "top_p" and sampling.top_p < 1:
        return truncation.top_p(ranked, sampling.top_p)
    if name == "min_p" and sampling.min_p:
        return truncation.min_p(ranked, sampling.min_p)
    if name == "typical_p" and sampling.typical_p < 1:
        return truncation.typical_p(ranked, sampling.typical_p)
    if name == "top_n_sigma" and sampling.top_n_sigma:
        return truncation.top_n_sigma(ranked, sampling.top_n_sigma)
    if name == "xtc" and sampling.xtc_probability:
        u = _uniforms(sampling.seed, rows, positions, _EXCLUDE)
        return truncation.exclude_top(ranked, sampling.xtc_threshold, u < sampling.xtc_probability)
    return ranked
