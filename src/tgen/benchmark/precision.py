"""Cost of storing the weights in fewer bits, in bits per byte of text."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Engine, Logits, reset
from tgen.generation.loop import generate
from tgen.generation.samplers import softmax
from tgen.reports.benchmark import PrecisionReport

_TEXTS, _TOKENS = 8, 256
_BITS = {"float32": 32, "bfloat16": 16, "int8": 8}


def compare_precision(
    engine: Engine,
    reference: Engine,
    start: Sequence[int],
    *,
    decode: Callable[[Sequence[int]], bytes],
    seed: int,
) -> PrecisionReport | None:
    """Score texts with two engines of one model.

    `reference` samples the texts after `start` at temperature 1. Returns None unless `engine`
    stores its weights in fewer bits than `reference`.
    """
    if _BITS[engine.dtype] >= _BITS[reference.dtype]:
        return None
    n = min(_TOKENS, reference.context_length) - len(start)
    texts = [list(start) for _ in range(_TEXTS)]
    sampling = SamplingConfig(temperature=1.0, top_k=0, max_new_tokens=n, seed=seed)
    for token in generate(reference, texts, sampling=sampling):
        texts[token.sequence].append(token.id)
    n_bytes = sum(len(decode(text[len(start) :])) for text in texts)
    nats, max_difference = [0.0, 0.0], 0.0
    for text in texts:
        both = [_logits(one, text, len(start)) for one in (engine, reference)]
        max_difference = max(max_difference, float(np.abs(both[0] - both[1]).max()))
        for i, logits in enumerate(both):
            probabilities = softmax(logits)[np.arange(len(logits)), text[len(start) :]]
            nats[i] -= float(np.log(probabilities).sum())
    bits, reference_bits = (value / math.log(2) / max(1, n_bytes) for value in nats)
    return PrecisionReport(
        dtype=engine.dtype,
        reference_dtype=reference.dtype,
        tokens=n * len(texts),
        bits_per_byte=bits,
        reference_bits_per_byte=reference_bits,
        max_logit_difference=max_difference,
    )


def _logits(engine: Engine, text: Sequence[int], prompt_length: int) -> Logits:
    """Return the logits that predict each token after the prompt, (T - prompt_length, V)."""
    reset(engine, 1)
    return engine.extend([text[:-1]], every_position=True)[prompt_length - 1 :]
