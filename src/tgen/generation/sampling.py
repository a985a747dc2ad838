"""The sampler: logits -> one token a row, by the samplers in their order and the draw.

Nothing here has a state. The random number behind a token is a function of its row's seed and its
position, so a row's text depends neither on its neighbours nor on how it was computed.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig
from tgen.engine.base import Logits
from tgen.errors import ModelError
from tgen.generation import samplers
from tgen.generation.samplers import Ranked
from tgen.reports import Removed

_BLOCK = 64  # positions whose numbers are made together
_DRAW, _EXCLUDE, _ROW, _SAMPLE = 0, 1, 2, 3  # the purpose of a random number


def sample(
    logits: Logits,
    sampling: SamplingConfig,
    *,
    seeds: Sequence[int],
    positions: Sequence[int],
    explanations: Sequence[list[Removed]] = (),
) -> list[int]:
    """A token id for each row of logits (B, V); `seeds` and `positions` name the random numbers.

    What each sampler removes is added to the rows' `explanations`, if they are given.
    """
    best = logits.argmax(axis=1)  # the lowest id among equals; of NaN where there is one
    if not np.isfinite(logits[np.arange(len(logits)), best]).all():
        raise ModelError("the model's logits are not finite", "its weights are damaged")
    may_lose_best = sampling.xtc_probability > 0 or sampling.typical_p < 1
    if sampling.temperature == 0 and not may_lose_best and not explanations:
        return best.tolist()  # type: ignore[no-any-return]
    names = [*sampling.samplers]
    if sampling.temperature == 0 and "temperature" not in names:
        names.append("temperature")
    active = [name for name in names if name != "top_n_sigma" or sampling.top_n_sigma]
    first_k = sampling.top_k if active[:1] == ["top_k"] and not explanations else 0
    ids, ranked = samplers.sort_candidates(logits, first_k)
    for name in names:
        before, ranked = ranked, _apply(name, ranked, sampling, seeds, positions)
        if explanations:
            _explain(name, before, ranked, explanations)
    cumulative = np.cumsum(samplers.softmax(ranked), axis=1)
    u = _uniforms(seeds, positions, _DRAW)[:, None]
    places = (cumulative <= u * cumulative[:, -1:]).sum(axis=1)
    # Rounding may lead past the last candidate that can be drawn.
    last = ranked.shape[1] - 1 - (ranked[:, ::-1] > -np.inf).argmax(axis=1)
    return [int(i) for i in ids[np.arange(len(ids)), np.minimum(places, last)]]


def row_seed(seed: int, row: int) -> int:
    """The seed of one row of several: the first row's is the seed itself, the others' are drawn.

    Below 2^53, so that they pass through JSON.
    """
    return seed if row == 0 else _random(seed, row, _ROW) >> 11


def sample_seed(seed: int, sample: int) -> int:
    """The same for one sample of several."""
    return seed if sample == 0 else _random(seed, sample, _SAMPLE) >> 11


def uniform(seed: int, position: int, purpose: int) -> float:
    """A number in [0, 1)."""
    return float(_random(seed, position, purpose) >> 11) * 2.0**-53


def _random(seed: int, position: int, purpose: int) -> int:
    """64 bits of a counter-based generator (Philox, Salmon et al. 2011)."""
    return _block(seed, position // _BLOCK, purpose)[position % _BLOCK]


@lru_cache(maxsize=1 << 12)
def _block(seed: int, block: int, purpose: int) -> list[int]:
    """The numbers of some positions, which come one after another anyway."""
    generator = np.random.Philox(key=[seed, purpose], counter=[block * _BLOCK, 0, 0, 0])
    four_a_position: list[int] = generator.random_raw(4 * _BLOCK).tolist()
    return four_a_position[::4]


def _uniforms(seeds: Sequence[int], positions: Sequence[int], purpose: int) -> NDArray[np.float64]:
    pairs = zip(seeds, positions, strict=True)
    return np.array([uniform(seed, position, purpose) for seed, position in pairs])


def _apply(
    name: str,
    ranked: Ranked,
    sampling: SamplingConfig,
    seeds: Sequence[int],
    positions: Sequence[int],
) -> Ranked:
    """One sampler, if it is on."""
    if name == "temperature":
        return samplers.apply_temperature(ranked, sampling.temperature)
    if name == "top_k" and sampling.top_k:
        return samplers.top_k(ranked, sampling.top_k)
    if name == "top_p" and sampling.top_p < 1:
        return samplers.top_p(ranked, sampling.top_p)
    if name == "min_p" and sampling.min_p:
        return samplers.min_p(ranked, sampling.min_p)
    if name == "typical_p" and sampling.typical_p < 1:
        return samplers.typical_p(ranked, sampling.typical_p)
    if name == "top_n_sigma" and sampling.top_n_sigma:
        return samplers.top_n_sigma(ranked, sampling.top_n_sigma)
    if name == "xtc" and sampling.xtc_probability:
        u = _uniforms(seeds, positions, _EXCLUDE)
        return samplers.xtc(ranked, sampling.xtc_threshold, u < sampling.xtc_probability)
    return ranked


def _explain(
    name: str, before: Ranked, after: Ranked, explanations: Sequence[list[Removed]]
) -> None:
    """What is in `before` and not in `after`, row by row; a sampler that is off removes nothing."""
    if after is before:
        return
    gone = (before > -np.inf) & (after == -np.inf)
    masses = np.where(gone, samplers.softmax(before), 0).sum(axis=1)
    left = (after > -np.inf).sum(axis=1)
    rows = zip(explanations, gone.sum(axis=1), masses, left, strict=True)
    for row, n, mass, n_left in rows:
        row.append(Removed(name, int(n), float(mass), int(n_left)))
