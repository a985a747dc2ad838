"""Which tokens may be drawn, and how likely each is then.

`sort_candidates` puts a row's candidates in order, the likeliest first. Each other function takes and gives
their logits (B, K), -inf where one has fallen away; of the rest at least one stays.
"""

import numpy as np
from numpy.typing import NDArray

from tgen.engine.base import Logits

Ids = NDArray[np.int64]
Ranked = NDArray[np.float64]


def sort_candidates(logits: Logits, k: int) -> tuple[Ids, Ranked]:
    """The k likeliest tokens of each row (B, V) and their logits, both (B, K); k = 0: all.

    Among equals the lower id comes first.
    """
    B, V = logits.shape
    if k == 0 or k >= V:
        ids = np.argsort(-logits, axis=1, kind="stable")
    else:
        border = -np.partition(-logits, k - 1, axis=1)[:, k - 1 : k]  # the k-th highest
        kept = logits >= border
        if np.count_nonzero(kept) > B * k:  # of equals at the border only the first
            above, level = logits > border, logits == border
            room = k - above.sum(axis=1, keepdims=True)
            kept = above | (level & (level.cumsum(axis=1) <= room))
        ids = np.nonzero(kept)[1].reshape(B, k)
        order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
        ids = np.take_along_axis(ids, order, axis=1)
    return ids, np.take_along_axis(logits, ids, axis=1).astype(np.float64)


def top_k(ranked: Ranked, k: int) -> Ranked:
    """The k likeliest (Fan et al. 2018)."""
    return _only(ranked, np.cumsum(ranked > -np.inf, axis=1) <= k)


def top_p(ranked: Ranked, p: float) -> Ranked:
    """The fewest whose probabilities reach p (Holtzman et al. 2020)."""
    probabilities = softmax(ranked)
    likelier = np.cumsum(probabilities, axis=1) - probabilities
    return _only(ranked, (likelier < p) | _first(ranked))


def min_p(ranked: Ranked, p: float) -> Ranked:
    """Those at least p times as likely as the likeliest (Nguyen et al. 2024)."""
    return _only(ranked, ranked >= ranked.max(axis=1, keepdims=True) + np.log(p))


def typical_p(ranked: Ranked, p: float) -> Ranked:
    """The fewest that reach p of those whose surprise is nearest to the entropy (Meister et al.
    2023)."""
    probabilities = softmax(ranked)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    entropy = (probabilities * np.minimum(surprise, 1e30)).sum(axis=1, keepdims=True)
    order = np.argsort(np.abs(surprise - entropy), axis=1, kind="stable")
    sorted_p = np.take_along_axis(probabilities, order, axis=1)
    nearer = np.cumsum(sorted_p, axis=1) - sorted_p
    kept = np.zeros(ranked.shape, bool)
    nearest = np.arange(ranked.shape[1]) == 0
    np.put_along_axis(kept, order, (nearer < p) | nearest, axis=1)
    return _only(ranked, kept)


def top_n_sigma(ranked: Ranked, n: float) -> Ranked:
    """Those within n standard deviations of the highest logit (Tang et al. 2024)."""
    there = ranked > -np.inf
    count = there.sum(axis=1, keepdims=True)
    values = np.where(there, ranked, 0)
    mean = values.sum(axis=1, keepdims=True) / count
    spread = np.sqrt((np.where(there, ranked - mean, 0) ** 2).sum(axis=1, keepdims=True) / count)
    return _only(ranked, ranked >= ranked.max(axis=1, keepdims=True) - n * spread)


def xtc(ranked: Ranked, threshold: float, chosen: NDArray[np.bool_]) -> Ranked:
    """XTC: in `chosen` rows (B,), of those with at least this probability only the least likely."""
    probable = softmax(ranked) >= threshold
    last = probable.sum(axis=1, keepdims=True)
    dropped = probable & (np.cumsum(probable, axis=1) < last) & chosen[:, None]
    return _only(ranked, ~dropped)


def apply_temperature(ranked: Ranked, temperature: float) -> Ranked:
    """Logits divided by the temperature; 0: the likeliest alone."""
    if temperature == 0:
        return _only(ranked, _first(ranked))
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    shifted = ranked - ranked.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        return np.where(ranked > -np.inf, np.maximum(shifted / temperature, -1e30), -np.inf)


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """(B, V) -> probabilities (B, V), in float64 so that sums and borders are steady."""
    wide = logits.astype(np.float64)
    exponentials = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def _only(ranked: Ranked, kept: NDArray[np.bool_]) -> Ranked:
    return np.where(kept, ranked, -np.inf)


def _first(ranked: Ranked) -> NDArray[np.bool_]:
    """The likeliest left, (B, K)."""
    there = ranked > -np.inf
    return np.asarray(there & (np.cumsum(there, axis=1) == 1))
