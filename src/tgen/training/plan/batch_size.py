"""The batch size of a run."""

from functools import partial

from tgen.config import ModelConfig, Precision, TrainConfig
from tgen.training.plan.model_size import PlanInputs
from tgen.training.plan.step_time import step_seconds

_MIN_STEP_TOKENS, _MAX_STEP_TOKENS = 2048, 16384
_MAX_UPDATE_SHARE = 0.075  # of a step's time that Muon may take: more tokens then cost little
_MIN_STEPS = 300  # of a run: fewer, larger steps learn less


def choose_batch_size(
    model: ModelConfig, context: int, train: TrainConfig, inputs: PlanInputs, precision: Precision
) -> int:
    """Return the windows of `context` tokens in a step, a multiple of the ranks."""
    limit = inputs.train_tokens // (8 * context)  # a step sees an eighth of the corpus at most
    wanted = _MIN_STEP_TOKENS
    if not inputs.on_cpu:
        wanted = _MAX_STEP_TOKENS  # with fewer, a GPU is idle
    elif train.steps is None and train.optimizer == "muon":
        speed, seconds = inputs.flops_per_second, 60 * train.minutes
        while wanted < _MAX_STEP_TOKENS:
            estimate = partial(step_seconds, model, flops_per_second=speed, precision=precision)
            step, without = (estimate(wanted, muon=muon) for muon in (True, False))
            is_cheap = step - without <= _MAX_UPDATE_SHARE * step
            if is_cheap or _MIN_STEPS * estimate(2 * wanted, muon=True) > seconds:
                break
            wanted *= 2
    return inputs.n_ranks * max(1, min(wanted // context, limit // inputs.n_ranks))
