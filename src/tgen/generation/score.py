"""How surprised a model is by a text."""

from collections.abc import Sequence

import numpy as np

from tgen.engine.base import Engine, reset
from tgen.generation.samplers import softmax
from tgen.generation.sequence import window_start


def total_nll(engine: Engine, ids: Sequence[int]) -> float:
    """Nats of all ids but the first, which begins the text.

    Past the context every token is predicted from at least the half before it.
    """
    length = engine.context_length
    reset(engine, 1)
    nats, scored = 0.0, 1
    while scored < len(ids):
        first = window_start(scored, length)
        window = ids[first : min(len(ids) - 1, first + length)]
        engine.rewind([0])
        (logits,) = engine.extend([window], every_position=True)
        targets = np.array(ids[scored : first + len(window) + 1])
        rows = softmax(logits[scored - 1 - first :])
        nats -= float(np.log(rows[np.arange(len(targets)), targets]).sum())
        scored += len(targets)
    return nats
