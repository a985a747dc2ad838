"""The distribution of the next token after each sampler, computed by the samplers themselves."""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig
from tgen.generation.logits_processors import LogitsProcessors
from tgen.generation.sample import not_finite
from tgen.generation.sequence import Request, SequenceState
from tgen.generation.truncation import (
    SortedLogits,
    enabled_samplers,
    removed_candidates,
    softmax,
    sort_candidates,
)
from tgen.generation.vocabulary import Vocabulary
from tgen.reports.generation import (
    PENALTIES,
    CandidateProbabilities,
    SamplingDistribution,
)

_ANY_LENGTH = 1 << 40  # a context that no text fills
MAX_PACKED = 8192  # tokens of a vocabulary whose logits are all in a record
_LEVELS = 65534  # of a packed logit
_N_LISTED = 500
_MIN_BIN, _BIN_GROWTH = 5e-4, 5e-3  # width of a bin, and per distance from the highest


def sampling_distribution(
    logits: NDArray[np.floating],
    ids: Sequence[int],
    sampling: SamplingConfig,
    vocabulary: Vocabulary,
    *,
    top: int = 0,
    also: Iterable[int] = (),
) -> SamplingDistribution:
    """Return the distribution of the token after `ids` before and after each sampler, from the
    model's logits (V,).

    Listed are the `top` candidates by the larger of their probabilities before and after sampling
    (0: all), and those of `also`. Raises ModelError for logits that are not finite, UsageError if
    no token is allowed.
    """
    model_logits = vocabulary.only_tokens(np.array(logits, np.float32)[None])
    if not np.isfinite(model_logits.max()):
        raise not_finite()
    processed = model_logits.copy()
    processors = LogitsProcessors(sampling, vocabulary)
    state = SequenceState(0, Request(ids, sampling), vocabulary, processors, _ANY_LENGTH)
    if state.changes_logits:
        state.process_logits(processed[0])
    # With XTC, the draws in which it acts (the last row) and those in which it does not.
    chance = sampling.xtc_probability if "xtc" in sampling.samplers else 0.0
    acts = np.array([True] if chance == 1 else [False, True] if chance else [False])
    shares = np.array([1 - chance, chance]) if len(acts) == 2 else np.ones(1)
    order, sorted_logits = sort_candidates(processed, 0)
    left, candidates = order[0], np.repeat(sorted_logits, len(acts), axis=0)
    model = softmax(model_logits)[0]
    probabilities, steps = [model], []
    removed_by = np.zeros(len(model), np.int64)

    def add(name: str, before: SortedLogits, after: SortedLogits) -> None:
        """Add a step for the candidates `left`; keep those that are left in any draw."""
        nonlocal left, candidates
        steps.append(removed_candidates(name, before, after)[-1])
        by_id = np.zeros(len(model))
        by_id[left] = shares @ softmax(after)
        probabilities.append(by_id)
        removed_by[left[(before[-1] > -np.inf) & (after[-1] == -np.inf)]] = len(steps)
        is_left = (after > -np.inf).any(axis=0)
        left, candidates = left[is_left], after[:, is_left]

    if state.changes_logits:
        before = np.take_along_axis(model_logits, order, axis=1).astype(np.float64)
        add(PENALTIES, np.repeat(before, len(acts), axis=0), candidates)
    for name, apply in enabled_samplers(sampling, acts).items():
        add(name, candidates, apply(candidates))
    final = probabilities[-1]
    listed = sort_candidates(np.maximum(model, final)[None], top)[0][0].tolist()
    listed = [*dict.fromkeys([*listed, *also])]
    names = ["", *(step.sampler for step in steps)]
    return SamplingDistribution(
        steps=steps,
        xtc_probability=chance,
        candidates=[
            CandidateProbabilities(
                id=i,
                text=vocabulary.bytes_of(i),
                logit=float(model_logits[0, i]),
                probability=float(model[i]),
                after=[float(values[i]) for values in probabilities[1:]],
                removed_by=names[removed_by[i]],
                final=float(final[i]),
            )
            for i in listed
        ],
    )


def logits_record(logits: NDArray[np.floating], also: Iterable[int] = ()) -> dict[str, Any]:
    """Return the logits (V,) for `samplers.js`, whose probabilities differ by less than 1e-3 at
    temperatures from 0.1 to 2.

    Up to a vocabulary of 8,192 all are packed: 16 bits for the square root of the distance from the
    highest. Above that it has the `ids` and `logits` of the highest 500 and of `also`, and for the
    others a histogram of logits: ascending `edges`, and `counts` of the bins between them.
    """
    narrow = np.asarray(logits, np.float32)
    wide = narrow.astype(np.float64)
    possible = wide > -np.inf
    highest, lowest = float(wide[possible].max()), float(wide[possible].min())
    if len(wide) <= MAX_PACKED:
        distance = np.where(possible, highest - wide, 0) / ((highest - lowest) or 1)
        levels = np.where(possible, 1 + np.rint(_LEVELS * (1 - np.sqrt(distance))), 0)
        packed = base64.b64encode(levels.astype("<u2").tobytes()).decode()
        return {"highest": highest, "range": highest - lowest, "packed": packed}
    ids = sort_candidates(narrow[None], _N_LISTED)[0][0].tolist()
    ids = [i for i in dict.fromkeys([*ids, *also]) if possible[i]]
    possible[ids] = False
    rest = wide[possible]
    top = float(rest.max()) if len(rest) else lowest
    # Bins get wider below the top, where logits matter less.
    edges = top - np.concatenate([[0.0], np.cumsum(_bin_widths(top - lowest))])
    counts, _ = np.histogram(rest, edges[::-1])
    return {
        "ids": ids,
        "logits": wide[ids].tolist(),
        "edges": edges[::-1].tolist(),
        "counts": counts.tolist(),
    }


def _bin_widths(length: float) -> list[float]:
    """Return widths that sum to more than a length."""
    widths, total = [_MIN_BIN], _MIN_BIN
    while total <= length:
        widths.append(max(_MIN_BIN, _BIN_GROWTH * total))
        total += widths[-1]
    return widths
