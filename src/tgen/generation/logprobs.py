"""What the model itself, before any rule or sampler, thought of the tokens that were picked."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tgen.engine.base import Logits
from tgen.generation.samplers import sort_candidates
from tgen.reports import Finish, Removed, Token


class Pick(NamedTuple):
    """A token that the sampler picked, and the place of the logits it was picked by."""

    row: int
    id: int
    place: int
    shown: bytes
    finish: Finish | None
    complete: bool
    n_likeliest: int
    removed: list[Removed]


def at(logits: Logits, places: list[int]) -> Logits:
    """These rows of the logits, without a copy where they are all of them in order."""
    return logits if places == list(range(len(logits))) else logits[places]


def reports(picks: Sequence[Pick], logits: Logits) -> Iterator[Token]:
    """The picks with their probabilities, ranks and entropies."""
    logits = at(logits, [pick.place for pick in picks])
    with np.errstate(over="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    totals = weights.sum(axis=1, dtype=np.float64)
    # Of p = w / t with w = exp(s): -sum p log p = log t - sum w s / t.
    products = weights * np.maximum(shifted, -1e30)  # a logit of -inf adds nothing
    entropies = np.log(totals) - products.sum(axis=1, dtype=np.float64) / totals
    chosen = shifted[np.arange(len(picks)), [pick.id for pick in picks]]
    ranks = (shifted > chosen[:, None]).sum(axis=1)
    thoughts = (chosen - np.log(totals), ranks, np.maximum(entropies, 0.0))
    found = zip(*(values.tolist() for values in thoughts), strict=True)
    for i, (pick, (logprob, place, entropy)) in enumerate(zip(picks, found, strict=True)):
        yield Token(
            row=pick.row,
            id=pick.id,
            text=pick.shown,
            logprob=logprob,
            rank=place,
            entropy=entropy,
            likeliest=_likeliest(shifted[i], float(np.log(totals[i])), pick.n_likeliest),
            removed=pick.removed,
            finish=pick.finish,
            complete=pick.complete,
        )


def _likeliest(shifted: Logits, log_total: float, n: int) -> list[tuple[int, float]]:
    if n == 0:
        return []
    ids, values = sort_candidates(shifted[None], min(n, len(shifted)))
    return [(int(i), float(x) - log_total) for i, x in zip(ids[0], values[0], strict=True)]
