"""What holding the weights in fewer bits costs, in bits per byte of a text."""

import math
from collections.abc import Sequence

import numpy as np

from tgen.engine.base import Engine, Logits, reset
from tgen.generation.truncation import softmax
from tgen.reports import PrecisionReport


def compare_weights(
    engine: Engine, exact: Engine, texts: Sequence[Sequence[int]], *, n_bytes: int
) -> PrecisionReport:
    """Scores the same texts with two engines of one model; `n_bytes` are those of the texts."""
    nats, difference = [0.0, 0.0], 0.0
    for text in texts:
        found = [_logits(one, text) for one in (engine, exact)]
        difference = max(difference, float(np.abs(found[0] - found[1]).max()))
        for i, logits in enumerate(found):
            chances = softmax(logits)[np.arange(len(logits)), text[1:]]
            nats[i] -= float(np.log(chances).sum())
    held, whole = (value / math.log(2) / n_bytes for value in nats)
    return PrecisionReport(
        stored=engine.stored,
        exact=exact.stored,
        tokens=sum(len(text) - 1 for text in texts),
        bits_per_byte=held,
        exact_bits_per_byte=whole,
        max_logit_difference=difference,
    )


def _logits(engine: Engine, text: Sequence[int]) -> Logits:
    """(t - 1, V): what is thought of each token but the first."""
    reset(engine, 1)
    return engine.extend([text[:-1]], every_position=True)[0]
