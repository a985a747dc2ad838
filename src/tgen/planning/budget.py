"""Choices within the time budget: steps and the work besides steps.

In fine-tuning, samples, evaluations and the general text each have 5% of the minutes: a large model
writes less.
"""

import math
from typing import NamedTuple

from tgen.config.training import TrainConfig
from tgen.planning.batch_size import (
    choose_batch_size,
    fine_tuning_windows,
    row_tokens,
    seconds_of_step,
)
from tgen.planning.costs import matmul_params
from tgen.planning.fine_tuning import max_epochs
from tgen.planning.model_size import EXPLICIT, PlannedRun, tokens_per_second
from tgen.reports.number_format import format_number

SHARE = 0.05  # of the minutes, for each kind of work beside the steps
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
_OTHER_SHARE = 0.05  # share of the time for evaluations, samples and saving
_SAMPLING_SECONDS = 0.3  # at least: one token at a time, however small the model
SAMPLE_TOKENS = 120
MEMORIZATION_SAMPLES, MEMORIZATION_TOKENS = 8, 128  # to search for in the training text
EXIT_SECONDS = 0.9  # for the process to end
_FEWEST_STEPS = 4  # of fine-tuning: windows are left out of a step if fewer steps would fit


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
        n_texts = TEXTS_WITH_STEPS if general_tokens is None else 0
        return SideWork(n_texts, general_tokens or n_texts * TEXT_TOKENS)
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


class Budget(NamedTuple):
    """The speed and length of a run."""

    tokens_per_second: float
    step_tokens: int
    steps: int
    why_steps: str
    epochs: float
    params_per_token: float  # parameters per training token
    max_steps: int | None = None  # however many the minutes allow
    side_work: SideWork = SideWork()


def choose_budget(run: PlannedRun) -> Budget:
    """Choose the tokens per step and estimate the steps and epochs of a run."""
    train, inputs, context = run.train, run.inputs, run.context
    choose = fine_tuning_windows if run.fine_tuning else choose_batch_size
    batch_size = train.batch_size or choose(run)
    step_tokens = batch_size * context
    speed = _tokens_per_second(run, step_tokens)
    side_work = choose_side_work(
        train, speed, general_tokens=inputs.general_tokens if run.fine_tuning else 0
    )
    n_evaluated = min(inputs.val_tokens, side_work.evaluated_tokens or inputs.val_tokens)
    closing = closing_seconds(run, n_evaluated, step_tokens, speed, side_work)
    other = inputs.setup_seconds + closing + EXIT_SECONDS + general_seconds(side_work, speed)
    if run.fine_tuning and train.batch_size is None and train.steps is None:
        tokens = speed * max(0.0, 60 * train.minutes - other) / _FEWEST_STEPS
        windows = int(tokens / context / inputs.n_ranks) * inputs.n_ranks
        step_tokens = context * min(batch_size, max(inputs.n_ranks, windows))
    steps = n_steps(train, speed / step_tokens, other_seconds=other)
    most = train.max_steps
    if run.fine_tuning and most is None and not run.inputs.memorizes_rows:
        most = _fine_tuning_steps(run, step_tokens)
    why = f"this machine trains at {inputs.flops_per_second / 1e9:,.0f} GFLOP/s"
    if inputs.measured_step is not None:
        seconds = inputs.measured_step.seconds_of(step_tokens)
        why = f"a step takes {format_number(seconds)} seconds here"
    if most is not None and train.steps is None and steps >= most:
        steps, why = most, EXPLICIT
        if train.max_steps is None:
            epochs = format_number(steps * step_tokens / inputs.train_tokens)
            why = f"{epochs} epochs; more would increase forgetting"
    return Budget(
        speed,
        step_tokens,
        steps,
        why,
        epochs=steps * step_tokens / inputs.train_tokens,
        params_per_token=matmul_params(run.model) / inputs.train_tokens,
        max_steps=most,
        side_work=side_work,
    )


def _tokens_per_second(run: PlannedRun, step_tokens: int) -> float:
    """Return the expected training speed of all ranks."""
    inputs = run.inputs
    if not inputs.on_cpu and inputs.measured_step is None:
        return tokens_per_second(inputs.flops_per_second, matmul_params(run.model))
    return (1 - _OTHER_SHARE) * step_tokens / seconds_of_step(run, step_tokens)


def _fine_tuning_steps(run: PlannedRun, step_tokens: int) -> int:
    """Return the maximum number of steps, from the epochs that suit the rows."""
    row, has_rows = row_tokens(run.inputs), run.inputs.train_rows is not None
    n_rows = max(1, round(run.inputs.train_tokens / row))
    epochs = max_epochs(n_rows, has_rows=has_rows, n_parameters=matmul_params(run.model))
    return max(1, round(n_rows * epochs / (step_tokens / row)))


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
    seconds = generation_seconds(1, min(SAMPLE_TOKENS, side_work.generated_tokens), speed)
    if run.inputs.train_rows is None:
        eval_tokens += min(6 * step_tokens, limit)
        n_tokens = min(MEMORIZATION_TOKENS, side_work.generated_tokens)
        seconds += generation_seconds(MEMORIZATION_SAMPLES, n_tokens, speed)
    return seconds + evaluation_seconds(eval_tokens, speed)


def n_steps(train: TrainConfig, steps_per_second: float, *, other_seconds: float = 0.0) -> int:
    """Return the steps the user set, or as many as fit into the minutes beside `other_seconds`."""
    seconds = max(0.0, train.minutes * 60 - other_seconds)
    return train.steps or max(1, round(steps_per_second * seconds))
