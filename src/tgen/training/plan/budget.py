"""Speed and length of a run."""

from typing import NamedTuple

from tgen.config import Precision, TrainConfig
from tgen.training.plan.batch_size import choose_batch_size
from tgen.training.plan.model_size import ModelChoice, PlanInputs, tokens_per_second
from tgen.training.plan.param_shapes import matmul_params
from tgen.training.plan.step_time import step_seconds

_OTHER_SHARE = 0.05  # share of the time for evaluations, samples and saving


class Budget(NamedTuple):
    """The speed and length of a run."""

    tokens_per_second: float
    step_tokens: int
    steps: int
    epochs: float
    params_per_token: float  # parameters per training token


def choose_budget(
    choice: ModelChoice, train: TrainConfig, inputs: PlanInputs, precision: Precision
) -> Budget:
    """Choose the tokens per step and estimate the steps and epochs of a run."""
    n_params = matmul_params(choice.model)
    batch_size = train.batch_size or choose_batch_size(
        choice.model, choice.context_length, train, inputs, precision
    )
    step_tokens = batch_size * choice.context_length
    speed = tokens_per_second(inputs.flops_per_second, n_params)
    if inputs.on_cpu:
        seconds = step_seconds(
            choice.model,
            step_tokens,
            inputs.flops_per_second,
            precision=precision,
            muon=train.optimizer == "muon",
        )
        speed = (1 - _OTHER_SHARE) * step_tokens / seconds
    steps = n_steps(train, speed / step_tokens)
    epochs = steps * step_tokens / inputs.train_tokens
    return Budget(speed, step_tokens, steps, epochs, n_params / inputs.train_tokens)


def n_steps(train: TrainConfig, steps_per_second: float) -> int:
    """Return the steps the user set, or as many as the minutes allow."""
    return train.steps or max(1, round(steps_per_second * train.minutes * 60))
