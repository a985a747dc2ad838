"""The batch size of a run."""

from collections.abc import Callable
from functools import partial

from tgen.config import ModelConfig
from tgen.config.training import Precision, ResolvedTrainConfig, TrainConfig
from tgen.training.plan.memory_estimate import USABLE, rank_memory
from tgen.training.plan.model_size import PlanInputs
from tgen.training.plan.step_time import step_seconds

_MIN_STEP_TOKENS, MAX_STEP_TOKENS = 2048, 16384  # of a rank
_MAX_UPDATE_SHARE = 0.1  # of a step's time that Muon may take: more tokens then cost little
_MIN_STEPS_PER_TOKEN = 300 / 4096  # of a run per token of a step: fewer, larger steps learn less


def choose_batch_size(
    model: ModelConfig, context: int, train: TrainConfig, inputs: PlanInputs, precision: Precision
) -> int:
    """Return the windows of `context` tokens in a step, a multiple of the ranks."""
    wanted = MAX_STEP_TOKENS  # with fewer, a GPU is idle
    if inputs.on_cpu:
        wanted = _balanced_tokens(model, context, train, inputs, precision)
    while wanted > _MIN_STEP_TOKENS and not _fits(model, context, train, inputs, precision, wanted):
        wanted //= 2
    limit = inputs.train_tokens // (8 * context)  # a step sees an eighth of the corpus at most
    return inputs.n_ranks * max(1, min(wanted // context, limit // inputs.n_ranks))


def _balanced_tokens(
    model: ModelConfig, context: int, train: TrainConfig, inputs: PlanInputs, precision: Precision
) -> int:
    """Return a rank's tokens per step of which Muon takes a small share, if time allows."""
    wanted = _MIN_STEP_TOKENS
    if train.steps is not None or train.optimizer != "muon":
        return wanted
    speed, seconds = inputs.flops_per_second / inputs.n_ranks, 60 * train.minutes
    if inputs.measured_step is not None:
        estimate: Callable[..., float] = inputs.measured_step.seconds_of
    else:
        estimate = partial(
            step_seconds, model, flops_per_second=speed, precision=precision, context=context
        )
    while wanted < MAX_STEP_TOKENS:
        step, without = (estimate(wanted, muon=muon) for muon in (True, False))
        is_cheap = step - without <= _MAX_UPDATE_SHARE * step
        min_steps = _MIN_STEPS_PER_TOKEN * 2 * wanted
        if is_cheap or min_steps * estimate(2 * wanted, muon=True) > seconds:
            break
        wanted *= 2
    return wanted


def _fits(
    model: ModelConfig,
    context: int,
    train: TrainConfig,
    inputs: PlanInputs,
    precision: Precision,
    step_tokens: int,
) -> bool:
    if inputs.rank_memory is None:
        return True
    config = ResolvedTrainConfig(
        batch_size=max(train.accumulation, step_tokens // context),
        accumulation=train.accumulation,
        precision=precision,
        optimizer=train.optimizer or ResolvedTrainConfig.optimizer,
        activation_checkpointing=bool(train.activation_checkpointing),
        dropout=ResolvedTrainConfig.dropout if train.dropout is None else train.dropout,
    )
    needed = rank_memory(
        model, config, context=context, n_ranks=1, parallel="ddp", on_gpu=not inputs.on_cpu
    )
    return needed.total <= USABLE * inputs.rank_memory
