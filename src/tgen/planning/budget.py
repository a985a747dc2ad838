"""Choices within the time budget: the steps, beside the work in `side_work`."""

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
from tgen.planning.side_work import (
    EXIT_SECONDS,
    SideWork,
    choose_side_work,
    closing_seconds,
    general_seconds,
)
from tgen.reports.number_format import format_number

_OTHER_SHARE = 0.05  # share of the time for evaluations, samples and saving
_FEWEST_STEPS = 4  # of fine-tuning: windows are left out of a step if fewer steps would fit


class Budget(NamedTuple):
    """The speed and length of a run."""

    tokens_per_second: float
    step_tokens: int  # computed per step; with R-Drop, each window counts twice
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
    batch_size = choose(run)
    if train.batch_size is not None:
        batch_size = (2 if train.consistency else 1) * train.batch_size
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


def n_steps(train: TrainConfig, steps_per_second: float, *, other_seconds: float = 0.0) -> int:
    """Return the steps the user set, or as many as fit into the minutes beside `other_seconds`."""
    seconds = max(0.0, train.minutes * 60 - other_seconds)
    return train.steps or max(1, round(steps_per_second * seconds))
