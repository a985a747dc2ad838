"""Which tokens may be drawn. Each function takes logits (B, V) and sets what falls away to -inf."""

import numpy as np

from tgen.engine.base import Logits


def keep_top_k(logits: Logits, k: int) -> Logits:
    """Exactly the k highest of each row; among equals the lower id. k = 0: all."""
    if k == 0 or k >= logits.shape[1]:
        return logits
    border = -np.partition(-logits, k - 1, axis=1)[:, k - 1 : k]  # the k-th highest
    above, level = logits > border, logits == border
    room = k - above.sum(axis=1, keepdims=True)
    return np.where(above | (level & (level.cumsum(axis=1) <= room)), logits, -np.inf)


def keep_top_p(logits: Logits, p: float) -> Logits:
    """The fewest tokens whose probabilities reach p (Holtzman et al. 2020); at least one."""
    if p >= 1.0:
        return logits
    order = np.argsort(-logits, axis=1, kind="stable")
    probabilities = np.take_along_axis(softmax(logits), order, axis=1)
    before = np.cumsum(probabilities, axis=1) - probabilities  # mass of the more likely tokens
    dropped = before >= p
    dropped[:, 0] = False
    kept = logits.copy()
    kept[np.arange(len(kept))[:, None], order] = np.where(
        dropped, -np.inf, np.take_along_axis(logits, order, axis=1)
    )
    return kept


def softmax(logits: Logits) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """(B, V) -> probabilities (B, V), in float64 so that sums and borders are steady."""
    wide = logits.astype(np.float64)
    exponentials = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))
