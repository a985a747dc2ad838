"""The work beside the steps: evaluations, samples, the general text; its limits and its time.

In fine-tuning, samples, evaluations and the general text each have 5% of the minutes: a large model
writes less.
"""

import math
from typing import NamedTuple

from tgen.config.training import ResolvedTrainConfig, TrainConfig
from tgen.planning.model_size import PlannedRun
from tgen.reports.number_format import format_number

SHARE = 0.05  # of the minutes, for each kind of work beside the steps
TEXT_TOKENS = 16  # of each text that the base model writes: more would be a sequence of more passes
_TEXTS_WITH_STEPS = 64  # however fast the machine is
_MIN_TEXTS, _MAX_TEXTS = 8, 256
_MIN_GENERATED_TOKENS, MAX_GENERATED_TOKENS = 16, 128
_MIN_EVALUATED_TOKENS = 64
_EVALUATION = 0.7  # time of an evaluated token, relative to one in a step
# A pass for one new token reads all weights. SmolLM2-135M on one CPU: as long as 17 tokens of an
# evaluation, 24 in a batch.
_PASS_TOKENS = 24
_MIN_PASS_SECONDS = 0.0012
_SAMPLING_SECONDS = 0.3  # at least: one token at a time, however small the model
SAMPLE_TOKENS = 120
MEMORIZATION_SAMPLES, MEMORIZATION_TOKENS = 8, 128  # to search for in the training text
_BASELINE_BYTES_PER_SECOND = 5e5
_BASELINE_BYTES = 1 << 24  # at most: n-gram counts take 50 times as much memory
EXIT_SECONDS = 0.9  # for the process to end
# For the number of steps between two evaluations
_EVALUATION_SHARE = 0.05  # fraction of the time
_EVALUATED_TOKENS = 3  # cost about as much as one in a step
_EVALUATION_SECONDS = 10.0  # between evaluations at least: each also saves and samples
_EVALUATION_EPOCHS = 3.0  # between evaluations at most: a small corpus is memorized that fast
_ROUNDED_EPOCHS = 2.9  # so many may remain of them in whole steps
_MIN_EVAL_EVERY, _MIN_FINE_TUNING_EVERY, _MEMORIZING_EVERY = 20, 5, 10  # steps: each also saves


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
    seconds = SHARE * 60 * train.minutes
    tokens = seconds * tokens_per_second / _EVALUATION
    if general_tokens == 0:
        if train.steps is not None:
            return SideWork()
        # The last evaluation may be repeated with other logits: see temperature_scaling.
        return SideWork(evaluated_tokens=max(_MIN_EVALUATED_TOKENS, round(tokens / 2)))
    if train.steps is not None:  # the same on every machine
        n_texts = _TEXTS_WITH_STEPS if general_tokens is None else 0
        return SideWork(n_texts, general_tokens or n_texts * TEXT_TOKENS)
    n_texts = 0
    if general_tokens is None:  # written once and evaluated twice
        n_texts = math.floor((tokens / TEXT_TOKENS - _PASS_TOKENS) / 3)
        n_texts = min(_MAX_TEXTS, n_texts) if n_texts >= _MIN_TEXTS else 0
        general_tokens = n_texts * TEXT_TOKENS
    generated = round(seconds / _generation_seconds(1, 1, tokens_per_second))
    return SideWork(
        n_texts,
        min(general_tokens, max(_MIN_EVALUATED_TOKENS, round(tokens / 2))),
        min(MAX_GENERATED_TOKENS, max(_MIN_GENERATED_TOKENS, generated)),
        max(_MIN_EVALUATED_TOKENS, round(tokens)),
    )


def evaluation_seconds(n_tokens: float, tokens_per_second: float) -> float:
    """Return the seconds to evaluate `n_tokens`."""
    return _EVALUATION * n_tokens / tokens_per_second


def _generation_seconds(n_texts: int, n_tokens: int, tokens_per_second: float) -> float:
    """Return the seconds to write `n_texts` texts of `n_tokens` tokens at the same time."""
    seconds = evaluation_seconds(_PASS_TOKENS + n_texts, tokens_per_second)
    return n_tokens * max(_MIN_PASS_SECONDS, seconds)


def general_seconds(side_work: SideWork, tokens_per_second: float) -> float:
    """Return the seconds to write and evaluate the general text before the first step."""
    seconds = evaluation_seconds(side_work.general_tokens, tokens_per_second)
    if n_texts := side_work.general_texts:
        seconds += _generation_seconds(n_texts, TEXT_TOKENS, tokens_per_second)
    return seconds


def closing_seconds(
    run: PlannedRun, eval_tokens: int, step_tokens: int, speed: float, side_work: SideWork
) -> float:
    """Return the seconds after the last step: evaluation of `eval_tokens` held-out tokens and of
    the general text, a sample and, except of rows, memorization."""
    limit = side_work.evaluated_tokens
    if limit is None or not run.fine_tuning:  # with steps the time does not matter
        eval_tokens += min(6 * step_tokens, limit or 6 * step_tokens)
        return evaluation_seconds(eval_tokens, speed) + _SAMPLING_SECONDS
    eval_tokens += side_work.general_tokens
    seconds = _generation_seconds(1, min(SAMPLE_TOKENS, side_work.generated_tokens), speed)
    if run.inputs.train_rows is None:
        eval_tokens += min(6 * step_tokens, limit)
        n_tokens = min(MEMORIZATION_TOKENS, side_work.generated_tokens)
        seconds += _generation_seconds(MEMORIZATION_SAMPLES, n_tokens, speed)
    return seconds + evaluation_seconds(eval_tokens, speed)


def choose_eval_tokens(run: PlannedRun, side_work: SideWork, train_tokens: int) -> int:
    """Return the most tokens of an evaluation; all steps train on `train_tokens`."""
    if run.train.eval_tokens is not None:
        return run.train.eval_tokens
    most = ResolvedTrainConfig.eval_tokens
    limit = min(most, side_work.evaluated_tokens or most)
    if run.fine_tuning or run.train.steps is not None:
        return limit
    # One evaluation must fit into its share.
    in_time = train_tokens * _EVALUATION_SHARE * _EVALUATED_TOKENS
    return max(1, min(limit, round(in_time)))


def choose_eval_every(
    run: PlannedRun, eval_tokens: int, steps: int, step_tokens: int, speed: float
) -> tuple[int, str]:
    """Return the steps between evaluations of `eval_tokens` tokens, and the reason; training has a
    `speed` in tokens per second."""
    train, inputs = run.train, run.inputs
    cost = min(inputs.val_tokens, eval_tokens) / _EVALUATED_TOKENS
    tokens = cost / _EVALUATION_SHARE  # to train on in between
    if run.fine_tuning:
        every = math.ceil(inputs.train_tokens / step_tokens / 2)  # twice per epoch,
        if inputs.val_tokens:  # and more often in long ones
            every = min(every, max(_MIN_EVAL_EVERY, round(tokens / step_tokens)))
        # With the clock, the run may have more steps than planned: one evaluation, at its end.
        every = max(_MEMORIZING_EVERY if inputs.memorizes_rows else _MIN_FINE_TUNING_EVERY, every)
        every = max(1, min(every, steps * (1 if train.steps is not None else 2)))
    else:
        if train.steps is None:  # the same number of steps is the same run on every machine
            tokens = max(tokens, _EVALUATION_SECONDS * speed)
        tokens = min(tokens, _EVALUATION_EPOCHS * inputs.train_tokens)
        every = max(_MIN_EVAL_EVERY, round(tokens / step_tokens))
    epochs = every * step_tokens / inputs.train_tokens
    if cost <= _EVALUATION_SHARE * every * step_tokens and epochs <= _ROUNDED_EPOCHS:
        return every, f"at most {_EVALUATION_SHARE:.0%} of the time"
    if run.fine_tuning:
        return every, "at least twice per epoch" if epochs <= 0.5 else "a few steps apart"
    return every, f"{format_number(epochs)} epochs apart"


def baseline_seconds(n_bytes: int) -> float:
    """Return the seconds to compress texts with the other compressors."""
    return n_bytes / _BASELINE_BYTES_PER_SECOND


def fits_baselines(n_bytes: int, minutes: float) -> bool:
    """Whether the other compressors need little of the time and memory for texts of this size."""
    return n_bytes <= _BASELINE_BYTES and baseline_seconds(n_bytes) <= SHARE * 60 * minutes
