"""How fast a run goes, and how far it comes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tgen.config import TrainConfig
from tgen.training.plan.model_size import PlanInputs, Shape, matmul_params, tokens_per_second

_STEP_TOKENS = 2048


class Budget(NamedTuple):
    """A run's speed and length."""

    tokens_per_second: float
    step_tokens: int
    steps: int
    epochs: float  # of the text
    params_per_token: float  # of the text


def choose_budget(
    shape: Shape, train: TrainConfig, given: Mapping[str, Any], facts: PlanInputs
) -> Budget:
    """How fast and how far a run with this shape goes; `given` are the user's own fields."""
    weights = matmul_params(shape.model)
    speed = tokens_per_second(facts.speed, weights)
    batch_size = given.get("batch_size", _batch_size(shape.context_length, facts))
    step_tokens = batch_size * shape.context_length
    steps = n_steps(train, speed / step_tokens)
    epochs = steps * step_tokens / facts.train_tokens
    return Budget(speed, step_tokens, steps, epochs, weights / facts.train_tokens)


def n_steps(train: TrainConfig, steps_per_second: float) -> int:
    """Those asked for, or as many as there is time for."""
    return train.steps or max(1, round(steps_per_second * train.minutes * 60))


def _batch_size(context: int, facts: PlanInputs) -> int:
    room = facts.train_tokens // (8 * context)  # a step sees an eighth of the text at most
    return facts.n_ranks * max(1, min(_STEP_TOKENS // context, room // facts.n_ranks))
