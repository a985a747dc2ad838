"""The likelihood of a text under a model."""

from collections.abc import Sequence

import numpy as np

from tgen.engine.base import Engine, reset
from tgen.generation.context_window import window_start
from tgen.generation.samplers import softmax


def total_nll(engine: Engine, ids: Sequence[int]) -> float:
    """Return the negative log-likelihood, in nats, of all ids after the first.

    Past the context length every token is predicted from at least half a context.
    """
    length = engine.context_length
    reset(engine, 1)
    nats, n_scored = 0.0, 1
    while n_scored < len(ids):
        start = window_start(n_scored, length)
        window = ids[start : min(len(ids) - 1, start + length)]
        engine.rewind([0])
        logits = engine.extend([window], every_position=True)
        targets = np.array(ids[n_scored : start + len(window) + 1])
        probabilities = softmax(logits[n_scored - 1 - start :])
        nats -= float(np.log(probabilities[np.arange(len(targets)), targets]).sum())
        n_scored += len(targets)
    return nats
