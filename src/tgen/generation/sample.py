"""Sampling: logits -> one token per sequence, and its log-probability, rank and entropy under the
model.

It has no state. The random number behind a token is a function of its sequence's seed and its
position, so a text depends neither on the rest of the batch nor on how it was computed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig
from tgen.engine.base import Logits
from tgen.engine.cpu.row_sampler import row_sampler
from tgen.errors import ModelError
from tgen.generation.random_numbers import TOKEN, XTC, uniforms
from tgen.generation.truncation import (
    enabled_samplers,
    removed_candidates,
    softmax,
    sort_candidates,
)
from tgen.reports.generation import RemovedCandidates


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
