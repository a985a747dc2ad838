"""What holding the weights in fewer bits costs, in bits per byte of a text."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Engine, Logits, reset
from tgen.generation.loop import generate
from tgen.generation.samplers import softmax
from tgen.reports import PrecisionReport

_TEXTS, _TOKENS = 8, 256
_BITS = {"float32": 32, "bfloat16": 16, "int8": 8}


def compare_weights(
    engine: Engine,
    exact: Engine,
    start: Sequence[int],
    *,
    decode: Callable[[Sequence[int]], bytes],
    seed: int,
) -> PrecisionReport | None:
    """Scores texts that `exact` writes after `start`, at temperature 1, with two engines of one
    model. None where `engine` does not hold its weights in fewer bits."""
    if _BITS[engine.stored] >= _BITS[exact.stored]:
        return None
    n = min(_TOKENS, exact.context_length) - len(start)
    texts = [list(start) for _ in range(_TEXTS)]
    sampling = SamplingConfig(temperature=1.0, top_k=0, max_new_tokens=n, seed=seed)
    for token in generate(exact, texts, sampling=sampling):
        texts[token.row].append(token.id)
    n_bytes = sum(len(decode(text[len(start) :])) for text in texts)
    nats, difference = [0.0, 0.0], 0.0
    for text in texts:
        found = [_logits(one, text, len(start)) for one in (engine, exact)]
        difference = max(difference, float(np.abs(found[0] - found[1]).max()))
        for i, logits in enumerate(found):
            chances = softmax(logits)[np.arange(len(logits)), text[len(start) :]]
            nats[i] -= float(np.log(chances).sum())
    held, whole = (value / math.log(2) / max(1, n_bytes) for value in nats)
    return PrecisionReport(
        stored=engine.stored,
        exact=exact.stored,
        tokens=n * len(texts),
        bits_per_byte=held,
        exact_bits_per_byte=whole,
        max_logit_difference=difference,
    )


def _logits(engine: Engine, text: Sequence[int], n_given: int) -> Logits:
    """(t - n_given, V): what is thought of each token but those given."""
    reset(engine, 1)
    return engine.extend([text[:-1]], every_position=True)[0][n_given - 1 :]
