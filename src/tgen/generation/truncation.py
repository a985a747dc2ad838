"""Samplers: they remove candidates for the next token, or reweight them (temperature).

`sort_candidates` sorts a row's candidates by descending logit. All samplers map their logits (B, K)
to new ones, -inf for removed candidates; at least one candidate per row is left.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig
from tgen.engine.base import Logits
from tgen.reports.generation import RemovedCandidates

Ids = NDArray[np.int64]
SortedLogits = NDArray[np.float64]


def sort_candidates(logits: Logits, k: int) -> tuple[Ids, SortedLogits]:
    """Return the k most likely tokens per row (B, V) and their logits, both (B, K); k = 0: all.

    Ties are sorted by ascending id.
    """
    B, V = logits.shape
    if k == 0 or k >= V:
        ids = np.argsort(-logits, axis=1, kind="stable")
    else:
        threshold = -np.partition(-logits, k - 1, axis=1)[:, k - 1 : k]  # the k-th highest logit
        kept = logits >= threshold
        if np.count_nonzero(kept) > B * k:  # ties at the k-th: only the first of them
            above, tied = logits > threshold, logits == threshold
            room = k - above.sum(axis=1, keepdims=True)
            kept = above | (tied & (tied.cumsum(axis=1) <= room))
        ids = np.nonzero(kept)[1].reshape(B, k)
        order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
        ids = np.take_along_axis(ids, order, axis=1)
    return ids, np.take_along_axis(logits, ids, axis=1).astype(np.float64)


def top_k(logits: SortedLogits, k: int) -> SortedLogits:
    """Keep the k most likely (Fan et al. 2018)."""
    return _keep(logits, np.cumsum(logits > -np.inf, axis=1) <= k)


def top_p(logits: SortedLogits, p: float) -> SortedLogits:
    """Nucleus sampling: keep the fewest whose probabilities sum to p (Holtzman et al. 2020)."""
    probabilities = softmax(logits)
    more_likely = np.cumsum(probabilities, axis=1) - probabilities
    return _keep(logits, (more_likely < p) | _first(logits))


def min_p(logits: SortedLogits, p: float) -> SortedLogits:
    """Keep those at least p times as likely as the most likely (Nguyen et al. 2024)."""
    return _keep(logits, logits >= logits.max(axis=1, keepdims=True) + np.log(p))


def typical_p(logits: SortedLogits, p: float) -> SortedLogits:
    """Locally typical sampling: keep the fewest with total probability p, starting with those whose
    surprisal is nearest to the entropy (Meister et al. 2023)."""
    probabilities = softmax(logits)
    with np.errstate(divide="ignore"):
        surprisal = -np.log(probabilities)
    entropy = (probabilities * np.minimum(surprisal, 1e30)).sum(axis=1, keepdims=True)
    order = np.argsort(np.abs(surprisal - entropy), axis=1, kind="stable")
    sorted_p = np.take_along_axis(probabilities, order, axis=1)
    nearer = np.cumsum(sorted_p, axis=1) - sorted_p
    kept = np.zeros(logits.shape, bool)
    nearest = np.arange(logits.shape[1]) == 0
    np.put_along_axis(kept, order, (nearer < p) | nearest, axis=1)
    return _keep(logits, kept)


def top_n_sigma(logits: SortedLogits, n: float) -> SortedLogits:
    """Keep those within n standard deviations of the highest logit (Tang et al. 2024)."""
    left = logits > -np.inf
    count = left.sum(axis=1, keepdims=True)
    values = np.where(left, logits, 0)
    mean = values.sum(axis=1, keepdims=True) / count
    squares = np.where(left, logits - mean, 0) ** 2
    deviation = np.sqrt(squares.sum(axis=1, keepdims=True) / count)
    return _keep(logits, logits >= logits.max(axis=1, keepdims=True) - n * deviation)


def xtc(logits: SortedLogits, threshold: float, active: NDArray[np.bool_]) -> SortedLogits:
    """XTC: in `active` rows (B,), remove all but the least likely of those above the threshold."""
    probable = softmax(logits) >= threshold
    last = probable.sum(axis=1, keepdims=True)
    removed = probable & (np.cumsum(probable, axis=1) < last) & active[:, None]
    return _keep(logits, ~removed)


def apply_temperature(logits: SortedLogits, temperature: float) -> SortedLogits:
    """Divide logits by the temperature; 0 keeps the most likely only."""
    if temperature == 0:
        return _keep(logits, _first(logits))
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    shifted = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        return np.where(logits > -np.inf, np.maximum(shifted / temperature, -1e30), -np.inf)


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """(B, V) -> probabilities (B, V), in float64 for accurate cumulative sums."""
    wide = logits.astype(np.float64)
    exponentials = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def _keep(logits: SortedLogits, kept: NDArray[np.bool_]) -> SortedLogits:
    return np.where(kept, logits, -np.inf)


def _first(logits: SortedLogits) -> NDArray[np.bool_]:
    """A mask (B, K) of the most likely candidate that is left."""
    left = logits > -np.inf
    return np.asarray(left & (np.cumsum(left, axis=1) == 1))


def enabled_samplers(
    sampling: SamplingConfig, xtc_active: NDArray[np.bool_]
) -> dict[str, Callable[[SortedLogits], SortedLogits]]:
    """Return the samplers that are not disabled, by name and in order; XTC acts on the rows of
    `xtc_active` (B,)."""
    s = sampling
    samplers: dict[str, Callable[[SortedLogits], SortedLogits]] = {
        "temperature": partial(apply_temperature, temperature=s.temperature)
    }
    if s.top_k:
        samplers["top_k"] = partial(top_k, k=s.top_k)
    if s.top_p < 1:
        samplers["top_p"] = partial(top_p, p=s.top_p)
    if s.min_p:
        samplers["min_p"] = partial(min_p, p=s.min_p)
    if s.typical_p < 1:
        samplers["typical_p"] = partial(typical_p, p=s.typical_p)
    if s.top_n_sigma:
        samplers["top_n_sigma"] = partial(top_n_sigma, n=s.top_n_sigma)
    if s.xtc_probability:
        samplers["xtc"] = partial(xtc, threshold=s.xtc_threshold, active=xtc_active)
    names = [*s.samplers]
    if s.temperature == 0 and "temperature" not in names:
        names.append("temperature")
    return {name: samplers[name] for name in names if name in samplers}


def removed_candidates(
    name: str, before: SortedLogits, after: SortedLogits
) -> list[RemovedCandidates]:
    """Return what a sampler removed, per row of the logits before and after it, (B, K)."""
    removed = (before > -np.inf) & (after == -np.inf)
    masses = np.where(removed, softmax(before), 0).sum(axis=1)
    left = (after > -np.inf).sum(axis=1)
    rows = zip(removed.sum(axis=1), masses, left, strict=True)
    return [RemovedCandidates(name, int(n), float(mass), int(n_left)) for n, mass, n_left in rows]
