"""Speed and length of a run."""

from typing import NamedTuple

from tgen.config.training import Precision, TrainConfig
from tgen.training.plan.batch_size import choose_batch_size
from tgen.training.plan.fine_tuning import WINDOW, max_steps, rows_per_step
from tgen.training.plan.model_size import ModelChoice, PlanInputs, tokens_per_second
from tgen.training.plan.param_shapes import matmul_params
from tgen.training.plan.side_work import (
    SideWork,
    choose_side_work,
    evaluation_seconds,
    general_seconds,
    generation_seconds,
)
from tgen.training.plan.step_time import step_seconds

_FROZEN_WORK = 4 / 6  # of products, without the gradients of the weights
_OTHER_SHARE = 0.05  # share of the time for evaluations, samples and saving
_SAMPLING_SECONDS = 0.3  # at least: one token at a time, however small the model
_SAMPLE_TOKENS, _MEMORIZATION_SAMPLES, _MEMORIZATION_TOKENS = 120, 8, 128
_EXIT_SECONDS = 0.9
_FEWEST_STEPS = 4  # of fine-tuning: windows are left out of a step if fewer steps would fit


class Budget(NamedTuple):
    """The speed and length of a run."""

    tokens_per_second: float
    step_tokens: int
    steps: int
    epochs: float
    params_per_token: float  # parameters per training token
    max_steps: int | None = None  # however many the minutes allow
    side_work: SideWork = SideWork()


def choose_budget(
    choice: ModelChoice,
    train: TrainConfig,
    inputs: PlanInputs,
    precision: Precision,
    *,
    fine_tuning: bool = False,
) -> Budget:
    """Choose the tokens per step and estimate the steps and epochs of a run."""
    n_params = matmul_params(choice.model)
    context, batch_size = choice.context_length, train.batch_size
    if batch_size is None and fine_tuning:
        batch_size = _fine_tuning_windows(context, inputs)
    batch_size = batch_size or choose_batch_size(choice.model, context, train, inputs, precision)
    step_tokens = batch_size * context
    speed = tokens_per_second(inputs.flops_per_second, n_params)
    if inputs.on_cpu:
        if inputs.measured_step is not None:
            seconds = inputs.measured_step.seconds_of(step_tokens)
        else:
            seconds = step_seconds(
                choice.model,
                step_tokens,
                inputs.flops_per_second,
                precision=precision,
                context=context,
                muon=train.optimizer == "muon" and train.lora is None,
                work=_FROZEN_WORK if train.lora is not None else 1.0,
            )
        speed = (1 - _OTHER_SHARE) * step_tokens / seconds
    side_work = choose_side_work(
        train, speed, general_tokens=inputs.general_tokens if fine_tuning else 0
    )
    n_evaluated = min(inputs.val_tokens, side_work.evaluated_tokens or inputs.val_tokens)
    has_rows = inputs.train_rows is not None
    closing = closing_seconds(n_evaluated, step_tokens, speed, side_work, has_rows=has_rows)
    other = inputs.setup_seconds + closing + _EXIT_SECONDS
    other += general_seconds(side_work, speed)
    if fine_tuning and train.batch_size is None and train.steps is None:
        tokens = speed * max(0.0, 60 * train.minutes - other) / _FEWEST_STEPS
        windows = int(tokens / context / inputs.n_ranks) * inputs.n_ranks
        step_tokens = context * min(batch_size, max(inputs.n_ranks, windows))
    steps = n_steps(train, speed / step_tokens, other_seconds=other)
    most = train.max_steps
    if fine_tuning and most is None:
        most = _fine_tuning_steps(step_tokens, inputs, n_params)
    if most is not None and train.steps is None:
        steps = min(steps, most)
    epochs = steps * step_tokens / inputs.train_tokens
    params_per_token = n_params / inputs.train_tokens
    return Budget(speed, step_tokens, steps, epochs, params_per_token, most, side_work)


def _fine_tuning_windows(context: int, inputs: PlanInputs) -> int:
    """Return the windows with about as many rows as `rows_per_step`; a multiple of the ranks."""
    row = _row_tokens(inputs)
    n_rows = round(inputs.train_tokens / row)
    windows = round(rows_per_step(n_rows) * row / context)
    limit = inputs.train_tokens // context  # a step sees the corpus once at most
    return inputs.n_ranks * max(1, min(windows, limit) // inputs.n_ranks)


def _fine_tuning_steps(step_tokens: int, inputs: PlanInputs, n_params: float) -> int:
    """Return the maximum number of steps, from the epochs that suit the rows."""
    row = _row_tokens(inputs)
    n_rows = max(1, round(inputs.train_tokens / row))
    has_rows = inputs.train_rows is not None
    return max_steps(n_rows, step_tokens / row, has_rows=has_rows, n_parameters=n_params)


def _row_tokens(inputs: PlanInputs) -> float:
    """Return the mean tokens of a row; plain text counts as rows of `WINDOW` tokens."""
    return inputs.train_tokens / inputs.train_rows if inputs.train_rows else WINDOW


def closing_seconds(
    eval_tokens: int,
    step_tokens: int,
    tokens_per_second: float,
    side_work: SideWork,
    *,
    has_rows: bool,
) -> float:
    """Return the seconds after the last step: evaluation of `eval_tokens` held-out tokens and of
    the general text, a sample and, except of rows, memorization."""
    speed, limit = tokens_per_second, side_work.evaluated_tokens
    if limit is None:  # a new model, which is small; with steps the time does not matter
        return (0.7 * eval_tokens + 4 * step_tokens) / speed + _SAMPLING_SECONDS
    eval_tokens += side_work.general_tokens
    seconds = generation_seconds(1, min(_SAMPLE_TOKENS, side_work.generated_tokens), speed)
    if not has_rows:
        eval_tokens += min(6 * step_tokens, limit)
        n_tokens = min(_MEMORIZATION_TOKENS, side_work.generated_tokens)
        seconds += generation_seconds(_MEMORIZATION_SAMPLES, n_tokens, speed)
    return seconds + evaluation_seconds(eval_tokens, speed)


def n_steps(train: TrainConfig, steps_per_second: float, *, other_seconds: float = 0.0) -> int:
    """Return the steps the user set, or as many as fit into the minutes beside `other_seconds`."""
    seconds = max(0.0, train.minutes * 60 - other_seconds)
    return train.steps or max(1, round(steps_per_second * seconds))
