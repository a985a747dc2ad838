"""Log-probabilities of all tokens of a text, under the model."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.engine.base import Engine, Logits, reset
from tgen.generation.sample import most_likely, not_finite
from tgen.generation.sequence import default_stride

_BLOCK = 96  # positions whose logits are in memory at a time


class TokenScores(NamedTuple):
    """Scores of n consecutive tokens of a text."""

    nats: NDArray[np.float64]  # (n,): negative log-likelihoods
    ranks: NDArray[np.int64]  # (n,): number of tokens that are more likely
    context: int  # tokens that predict the first of them; each later one has one more


class TokenLogprobs(NamedTuple):
    """The log-probabilities of a token and of the most likely tokens at its position, in nats."""

    id: int
    logprob: float | None  # None: nothing predicts the first token of a text
    top_logprobs: Sequence[tuple[int, float]]


def score_prompt(engine: Engine, prompt: Sequence[int], n_top: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of a prompt's tokens, those of `score_stream`, and of the
    `n_top` most likely ones.

    Up to one token more than the context. Raises ModelError if the memory has no room.
    """
    reset(engine, 1)
    engine.check_room([min(len(prompt), engine.context_length)])
    tokens = [TokenLogprobs(prompt[0], None, [])]
    for logits, targets in predictions(engine, prompt, 1):
        nats = token_nats(logits, targets)
        if np.isnan(nats).any():
            raise not_finite()
        for row, i, value in zip(logits, targets, nats.tolist(), strict=True):
            tokens.append(TokenLogprobs(i, -value, most_likely(row, n_top, i, -value)))
    return tokens


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
