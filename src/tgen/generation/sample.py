"""Sampling: logits -> one token per sequence, through samplers that remove or reweight candidates,
and its log-probability, rank and entropy under the model.

It has no state. The random number behind a token is a function of its sequence's seed and its
position, so a text depends neither on the rest of the batch nor on how it was computed.

`sort_candidates` sorts a row's candidates by descending logit. All samplers map their logits (B, K)
to new ones, -inf for removed candidates; at least one candidate per row is left.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig
from tgen.engine.base import Logits
from tgen.engine.cpu.row_sampler import row_sampler
from tgen.errors import ModelError
from tgen.generation.random_numbers import TOKEN, XTC, uniforms
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


def sample(
    logits: Logits,
    sampling: SamplingConfig,
    *,
    seeds: Sequence[int],
    positions: Sequence[int],
    explanations: Sequence[list[RemovedCandidates]] = (),
) -> list[int]:
    """Sample a token id per row of logits (B, V); `seeds` and `positions` set the random numbers.

    If there are `explanations`, one list per row, what each sampler removes is appended to them.
    """
    sampler = None if explanations else row_sampler()
    if sampler and sampler.accepts(sampling) and logits.dtype == np.float32:
        tokens = sampler.sample(logits, seeds, positions)
        if -1 in tokens:
            raise not_finite()
        return tokens
    best = logits.argmax(axis=1)  # the lowest id of equals; a NaN if there is one
    if not np.isfinite(logits[np.arange(len(logits)), best]).all():
        raise not_finite()
    may_remove_best = sampling.xtc_probability > 0 or sampling.typical_p < 1
    if sampling.temperature == 0 and not may_remove_best and not explanations:
        return best.tolist()  # type: ignore[no-any-return]
    active = np.zeros(len(logits), bool)
    if sampling.xtc_probability:
        active = np.array(uniforms(seeds, positions, XTC)) < sampling.xtc_probability
    samplers = enabled_samplers(sampling, active)
    first_k = sampling.top_k if [*samplers][:1] == ["top_k"] and not explanations else 0
    ids, candidates = sort_candidates(logits, first_k)
    for name, apply in samplers.items():
        before, candidates = candidates, apply(candidates)
        if explanations:
            rows = zip(explanations, removed_candidates(name, before, candidates), strict=True)
            for steps, removed in rows:
                steps.append(removed)
    cumulative = np.cumsum(softmax(candidates), axis=1)
    u = np.array(uniforms(seeds, positions, TOKEN))[:, None]
    chosen = (cumulative <= u * cumulative[:, -1:]).sum(axis=1)
    # Rounding may lead past the last candidate that is left.
    last = candidates.shape[1] - 1 - (candidates[:, ::-1] > -np.inf).argmax(axis=1)
    return [int(i) for i in ids[np.arange(len(ids)), np.minimum(chosen, last)]]


def not_finite() -> ModelError:
    """Return the error of logits that cannot be sampled from."""
    hint = "use another, undamaged model; if its dtype is float16, set dtype to float32"
    return ModelError("the model's logits are not finite", hint)


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


def describe(logits: Logits, tokens: Sequence[int]) -> list[tuple[float, int, float]]:
    """Return a token's log-probability, how many are more likely, and the entropy in nats, per row
    of logits (B, V) before processors and samplers."""
    sampler = row_sampler()
    if sampler and logits.dtype == np.float32:
        return sampler.describe(logits, tokens)
    with np.errstate(over="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(axis=1, dtype=np.float64)
    # With p = w / t and w = exp(s): -sum p log p = log t - sum w s / t.
    products = exponentials * np.maximum(shifted, -1e30)  # a logit of -inf adds 0
    entropies = np.log(totals) - products.sum(axis=1, dtype=np.float64) / totals
    chosen = shifted[np.arange(len(tokens)), tokens]
    ranks = (shifted > chosen[:, None]).sum(axis=1)
    columns = (chosen - np.log(totals), ranks, np.maximum(entropies, 0.0))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def most_likely(
    logits: NDArray[np.float32], n: int, token: int, logprob: float
) -> list[tuple[int, float]]:
    """Return the ids and log-probabilities of the n most likely tokens under the logits (V,), given
    the log-probability of one token."""
    if not n:
        return []
    ids, values = sort_candidates(logits[None], n)
    log_total = float(logits[token]) - logprob
    return [(int(i), float(x) - log_total) for i, x in zip(ids[0], values[0], strict=True)]
