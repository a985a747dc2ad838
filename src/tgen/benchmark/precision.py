"""Cost of storing the weights in fewer bits, in bits per byte of text."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tgen.config import STORED_BYTES, SamplingConfig
from tgen.engine.base import Engine
from tgen.generation.loop import generate
from tgen.generation.score import block_nll, predictions
from tgen.reports.benchmark import PrecisionReport

_TEXTS, _TOKENS = 8, 256


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
    if STORED_BYTES[engine.dtype] >= STORED_BYTES[reference.dtype]:
        return None
    n = min(_TOKENS, reference.context_length) - len(start)
    texts = [list(start) for _ in range(_TEXTS)]
    sampling = SamplingConfig(temperature=1.0, top_k=0, max_new_tokens=n, seed=seed)
    for token in generate(reference, texts, sampling=sampling):
        texts[token.sequence].append(token.id)
    n_bytes = sum(len(decode(text[len(start) :])) for text in texts)
    nats, max_difference = [0.0, 0.0], 0.0
    for text in texts:
        blocks = (predictions(one, text, len(start)) for one in (engine, reference))
        for (logits, targets), (reference_logits, _) in zip(*blocks, strict=True):
            nats[0] += block_nll(logits, targets)
            nats[1] += block_nll(reference_logits, targets)
            difference = float(np.abs(logits - reference_logits).max())
            max_difference = max(max_difference, difference)
    bits, reference_bits = (value / math.log(2) / max(1, n_bytes) for value in nats)
    return PrecisionReport(
        dtype=engine.dtype,
        reference_dtype=reference.dtype,
        tokens=n * len(texts),
        bits_per_byte=bits,
        reference_bits_per_byte=reference_bits,
        max_logit_difference=max_difference,
    )
