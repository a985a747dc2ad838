"""The likelihood of a text under a model."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from tgen.engine.base import Engine, Logits, reset
from tgen.generation.context_window import window_start

_BLOCK = 96  # positions whose logits are in memory at a time


def total_nll(engine: Engine, ids: Sequence[int]) -> float:
    """Return the negative log-likelihood, in nats, of all ids after the first.

    Past the context length every token is predicted from at least half a context.
    """
    length = engine.context_length
    nats, n_scored = 0.0, 1
    while n_scored < len(ids):
        start = window_start(n_scored, length)
        window = ids[start : start + length + 1]
        for logits, targets in predictions(engine, window, n_scored - start):
            nats += block_nll(logits, targets)
            n_scored += len(targets)
    return nats


def predictions(
    engine: Engine, ids: Sequence[int], n_before: int
) -> Iterator[tuple[Logits, Sequence[int]]]:
    """Yield the logits (n, V) that predict the ids after the first `n_before`, and those ids (n,),
    in blocks: the logits of a whole context may take gigabytes."""
    reset(engine, 1)
    if n_before > 1:
        engine.extend([ids[: n_before - 1]])
    for start in range(n_before, len(ids), _BLOCK):
        targets = ids[start : start + _BLOCK]
        yield (
            engine.extend([ids[start - 1 : start + len(targets) - 1]], every_position=True),
            targets,
        )


def block_nll(logits: Logits, targets: Sequence[int]) -> float:
    """Return the negative log-likelihood, in nats, of the ids (n,) under their logits (n, V)."""
    nats = 0.0
    for row, target in zip(logits, targets, strict=True):
        wide = row.astype(np.float64)
        highest = wide.max()
        nats += float(highest - wide[target]) + math.log(np.exp(wide - highest).sum())
    return nats
