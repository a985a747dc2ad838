"""Log-probabilities of sampled tokens under the model, before processors and samplers."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tgen.engine.base import Logits
from tgen.engine.cpu.row_sampler import row_sampler
from tgen.generation.sample import sort_candidates
from tgen.reports.generation import Finish, RemovedCandidates, Token


class Pick(NamedTuple):
    """A sampled token and the row of the logits that it was sampled from."""

    sequence: int
    id: int
    row: int
    text: bytes
    finish: Finish | None
    complete: bool
    n_top: int
    removed: list[RemovedCandidates]


def select_rows(logits: Logits, rows: list[int]) -> Logits:
    """Return these rows of the logits, without a copy if they are all rows in order."""
    return logits if rows == list(range(len(logits))) else logits[rows]


def make_tokens(picks: Sequence[Pick], logits: Logits) -> Iterator[Token]:
    """Yield a Token per pick, with its log-probability, rank and entropy."""
    logits = select_rows(logits, [pick.row for pick in picks])
    ids, sampler = [pick.id for pick in picks], row_sampler()
    compiled = sampler is not None and logits.dtype == np.float32
    described = sampler.describe(logits, ids) if sampler and compiled else _describe(logits, ids)
    for row, pick, (logprob, rank, entropy) in zip(logits, picks, described, strict=True):
        top = []
        if pick.n_top:
            best, values = sort_candidates(row[None], min(pick.n_top, len(row)))
            log_total = float(row[pick.id]) - logprob
            top = [(int(i), float(x) - log_total) for i, x in zip(best[0], values[0], strict=True)]
        yield _make_token(pick, logprob, rank, entropy, top)


def _describe(logits: Logits, ids: Sequence[int]) -> list[tuple[float, int, float]]:
    """`RowSampler.describe` without the kernels."""
    with np.errstate(over="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(axis=1, dtype=np.float64)
    # With p = w / t and w = exp(s): -sum p log p = log t - sum w s / t.
    products = exponentials * np.maximum(shifted, -1e30)  # a logit of -inf adds 0
    entropies = np.log(totals) - products.sum(axis=1, dtype=np.float64) / totals
    chosen = shifted[np.arange(len(ids)), ids]
    ranks = (shifted > chosen[:, None]).sum(axis=1)
    columns = (chosen - np.log(totals), ranks, np.maximum(entropies, 0.0))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _make_token(
    pick: Pick, logprob: float, rank: int, entropy: float, top: list[tuple[int, float]]
) -> Token:
    return Token(
        sequence=pick.sequence,
        id=pick.id,
        text=pick.text,
        logprob=logprob,
        rank=rank,
        entropy=entropy,
        top_logprobs=top,
        removed=pick.removed,
        finish=pick.finish,
        complete=pick.complete,
    )
