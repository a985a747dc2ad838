"""Log-probabilities under the model: of sampled tokens, before processors and samplers, and of all
tokens of a text.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.engine.base import Engine, Logits, reset
from tgen.engine.cpu.row_sampler import row_sampler
from tgen.generation.sample import sort_candidates
from tgen.generation.sequence import default_stride
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


_BLOCK = 96  # positions whose logits are in memory at a time


class TokenScores(NamedTuple):
    """Scores of n consecutive tokens of a text."""

    nats: NDArray[np.float64]  # (n,): negative log-likelihoods
    ranks: NDArray[np.int64]  # (n,): number of tokens that are more likely
    context: int  # tokens that predict the first of them; each later one has one more


def score_stream(
    engine: Engine, ids: Iterable[Sequence[int]], *, stride: int | None = None
) -> Iterator[TokenScores]:
    """Yield the scores of all tokens after the first of a text, whose ids come in pieces.

    The first window has as many tokens as the context. Each later one starts `stride` tokens (None:
    half a context) after the one before and scores the tokens that are new in it. Memory is bounded
    by the context, the longest piece and the logits of one block.
    """
    length = engine.context_length
    stride = stride or default_stride(length)
    pieces = iter(ids)
    window: list[int] = []  # the ids from the start of the window on
    n_before = 1  # ids of the window that are scored or the first of the text
    while True:
        while len(window) <= length and (piece := next(pieces, None)) is not None:
            window += piece
        for logits, targets in predictions(engine, window[: length + 1], n_before):
            yield TokenScores(token_nats(logits, targets), token_ranks(logits, targets), n_before)
            n_before += len(targets)
        if len(window) <= length:
            return
        del window[:stride]
        n_before -= stride


def predictions(
    engine: Engine, ids: Sequence[int], n_before: int
) -> Iterator[tuple[Logits, Sequence[int]]]:
    """Yield the logits (n, V) that predict the ids after the first `n_before`, and those ids (n,),
    in blocks: the logits of a whole context may take gigabytes."""
    if n_before >= len(ids):
        return
    reset(engine, 1)
    if n_before > 1:
        engine.extend([ids[: n_before - 1]])
    for start in range(n_before, len(ids), _BLOCK):
        targets = ids[start : start + _BLOCK]
        yield (
            engine.extend([ids[start - 1 : start + len(targets) - 1]], every_position=True),
            targets,
        )


def token_nats(logits: Logits, targets: Sequence[int]) -> NDArray[np.float64]:
    """Return (n,): the negative log-likelihood, in nats, of each id under its logits (n, V)."""
    nats = np.empty(len(targets))
    for i, (row, target) in enumerate(zip(logits, targets, strict=True)):
        wide = row.astype(np.float64)  # a row at a time: the block may be large
        highest = wide.max()
        nats[i] = highest - wide[target] + math.log(np.exp(wide - highest).sum())
    return nats


def token_ranks(logits: Logits, targets: Sequence[int]) -> NDArray[np.int64]:
    """Return (n,): the number of ids with larger logits (n, V) than each id (n,)."""
    ranks = [(row > row[i]).sum() for row, i in zip(logits, targets, strict=True)]
    return np.array(ranks, np.int64)


def block_nll(logits: Logits, targets: Sequence[int]) -> float:
    """Return the negative log-likelihood, in nats, of the ids (n,) under their logits (n, V)."""
    return float(token_nats(logits, targets).sum())
