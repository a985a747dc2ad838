"""The work of a fine-tuning run beside its steps, and how long it takes.

Samples, evaluations and the general text each have 5% of the minutes: a large model writes less.
"""

import math
from typing import NamedTuple

from tgen.config.training import TrainConfig

SHARE = 0.05  # of the minutes
TEXT_TOKENS = 16  # of each text that the base model writes: more would be a sequence of more passes
TEXTS_WITH_STEPS = 64  # however fast the machine is
_MIN_TEXTS, _MAX_TEXTS = 8, 256
_MIN_GENERATED_TOKENS, MAX_GENERATED_TOKENS = 16, 128
_MIN_EVALUATED_TOKENS = 64
_EVALUATION = 0.7  # time of an evaluated token, relative to one in a step
# A pass for one new token reads all weights. SmolLM2-135M on one CPU: as long as 17 tokens of an
# evaluation, 24 in a batch.
_PASS_TOKENS = 24
_MIN_PASS_SECONDS = 0.0012


class SideWork(NamedTuple):
    """Limits of the work beside the steps."""

    general_texts: int = 0  # texts of `TEXT_TOKENS` tokens that the base model writes
    general_tokens: int = 0  # of these texts, or of the user's
    generated_tokens: int = MAX_GENERATED_TOKENS  # of a sample
    # Of the training text and of each evaluation; None: no limit
    evaluated_tokens: int | None = None


def choose_side_work(
    train: TrainConfig, tokens_per_second: float, *, general_tokens: int | None
) -> SideWork:
    """Return limits for a model that trains on `tokens_per_second`.

    `general_tokens` are those of the user's general text, 0 for a new model; None: the base model
    writes a text.
    """
    if general_tokens == 0:
        return SideWork()
    if train.steps is not None:  # the same on every machine
        n_texts = TEXTS_WITH_STEPS if general_tokens is None else 0
        return SideWork(n_texts, general_tokens or n_texts * TEXT_TOKENS)
    seconds = SHARE * 60 * train.minutes
    tokens = seconds * tokens_per_second / _EVALUATION
    n_texts = 0
    if general_tokens is None:  # written once and evaluated twice
        n_texts = math.floor((tokens / TEXT_TOKENS - _PASS_TOKENS) / 3)
        n_texts = min(_MAX_TEXTS, n_texts) if n_texts >= _MIN_TEXTS else 0
        general_tokens = n_texts * TEXT_TOKENS
    generated = round(seconds / generation_seconds(1, 1, tokens_per_second))
    return SideWork(
        n_texts,
        min(general_tokens, max(_MIN_EVALUATED_TOKENS, round(tokens / 2))),
        min(MAX_GENERATED_TOKENS, max(_MIN_GENERATED_TOKENS, generated)),
        max(_MIN_EVALUATED_TOKENS, round(tokens)),
    )


def evaluation_seconds(n_tokens: float, tokens_per_second: float) -> float:
    """Return the seconds to evaluate `n_tokens`."""
    return _EVALUATION * n_tokens / tokens_per_second


def generation_seconds(n_texts: int, n_tokens: int, tokens_per_second: float) -> float:
    """Return the seconds to write `n_texts` texts of `n_tokens` tokens at the same time."""
    seconds = evaluation_seconds(_PASS_TOKENS + n_texts, tokens_per_second)
    return n_tokens * max(_MIN_PASS_SECONDS, seconds)


def general_seconds(side_work: SideWork, tokens_per_second: float) -> float:
    """Return the seconds to write and evaluate the general text before the first step."""
    seconds = evaluation_seconds(side_work.general_tokens, tokens_per_second)
    if n_texts := side_work.general_texts:
        seconds += generation_seconds(n_texts, TEXT_TOKENS, tokens_per_second)
    return seconds
