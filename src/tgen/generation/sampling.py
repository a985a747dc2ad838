"""The sampler: logits -> one token per sequence.

It has no state. The random number behind a token is a function of its sequence's seed and its
position, so a text depends neither on the rest of the batch nor on how it was computed.
"""

from collections.abc import Sequence

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Logits
from tgen.engine.cpu.row_sampler import row_sampler
from tgen.errors import ModelError
from tgen.generation import samplers
from tgen.generation.random_numbers import TOKEN, XTC, uniforms
from tgen.generation.samplers import SortedLogits
from tgen.reports.generation import RemovedCandidates

_COMPILED_SAMPLERS = ["top_k", "top_p", "min_p", "temperature"]
_MIN_TEMPERATURE = 1e-3  # of float32 exponents


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
    if sampler and _is_compiled(sampling) and logits.dtype == np.float32:
        tokens = sampler.sample(
            logits,
            uniforms(seeds, positions, TOKEN).tolist(),
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            temperature=sampling.temperature,
        )
        if -1 in tokens:
            raise _not_finite()
        return tokens
    best = logits.argmax(axis=1)  # the lowest id of equals; a NaN if there is one
    if not np.isfinite(logits[np.arange(len(logits)), best]).all():
        raise _not_finite()
    may_remove_best = sampling.xtc_probability > 0 or sampling.typical_p < 1
    if sampling.temperature == 0 and not may_remove_best and not explanations:
        return best.tolist()  # type: ignore[no-any-return]
    names = [*sampling.samplers]
    if sampling.temperature == 0 and "temperature" not in names:
        names.append("temperature")
    active = [name for name in names if name != "top_n_sigma" or sampling.top_n_sigma]
    first_k = sampling.top_k if active[:1] == ["top_k"] and not explanations else 0
    ids, candidates = samplers.sort_candidates(logits, first_k)
    for name in names:
        before, candidates = candidates, _apply(name, candidates, sampling, seeds, positions)
        if explanations:
            _explain(name, before, candidates, explanations)
    cumulative = np.cumsum(samplers.softmax(candidates), axis=1)
    u = uniforms(seeds, positions, TOKEN)[:, None]
    chosen = (cumulative <= u * cumulative[:, -1:]).sum(axis=1)
    # Rounding may lead past the last candidate that is left.
    last = candidates.shape[1] - 1 - (candidates[:, ::-1] > -np.inf).argmax(axis=1)
    return [int(i) for i in ids[np.arange(len(ids)), np.minimum(chosen, last)]]


def _not_finite() -> ModelError:
    return ModelError("the model's logits are not finite", "use another, undamaged model")


def _is_compiled(sampling: SamplingConfig) -> bool:
    """Whether only top-k, top-p, min-p and temperature are active, in this order."""
    order = [name for name in sampling.samplers if name in _COMPILED_SAMPLERS]
    return (
        order == _COMPILED_SAMPLERS
        and sampling.typical_p == 1
        and not sampling.top_n_sigma
        and not sampling.xtc_probability
        and _MIN_TEMPERATURE <= sampling.temperature <= 1 / _MIN_TEMPERATURE
    )


def _apply(
    name: str,
    candidates: SortedLogits,
    sampling: SamplingConfig,
    seeds: Sequence[int],
    positions: Sequence[int],
) -> SortedLogits:
    """Apply one sampler, or return the same array if it is disabled."""
    if name == "temperature":
        return samplers.apply_temperature(candidates, sampling.temperature)
    if name == "top_k" and sampling.top_k:
        return samplers.top_k(candidates, sampling.top_k)
    if name == "top_p" and sampling.top_p < 1:
        return samplers.top_p(candidates, sampling.top_p)
    if name == "min_p" and sampling.min_p:
        return samplers.min_p(candidates, sampling.min_p)
    if name == "typical_p" and sampling.typical_p < 1:
        return samplers.typical_p(candidates, sampling.typical_p)
    if name == "top_n_sigma" and sampling.top_n_sigma:
        return samplers.top_n_sigma(candidates, sampling.top_n_sigma)
    if name == "xtc" and sampling.xtc_probability:
        active = uniforms(seeds, positions, XTC) < sampling.xtc_probability
        return samplers.xtc(candidates, sampling.xtc_threshold, active)
    return candidates


def _explain(
    name: str,
    before: SortedLogits,
    after: SortedLogits,
    explanations: Sequence[list[RemovedCandidates]],
) -> None:
    """Append per row what a sampler removed; nothing if it is disabled."""
    if after is before:
        return
    removed = (before > -np.inf) & (after == -np.inf)
    masses = np.where(removed, samplers.softmax(before), 0).sum(axis=1)
    left = (after > -np.inf).sum(axis=1)
    rows = zip(explanations, removed.sum(axis=1), masses, left, strict=True)
    for steps, n, mass, n_left in rows:
        steps.append(RemovedCandidates(name, int(n), float(mass), int(n_left)))
