"""The plan for a corpus, a time budget and a machine: pure functions that also give reasons.

docs/learning.md has the measurements behind the thresholds; some are interpolated.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tgen.config import SIZES, ModelConfig
from tgen.config.training import Optimizer, Precision, ResolvedTrainConfig, TrainConfig
from tgen.errors import CorpusError, UsageError
from tgen.planning.budget import (
    MAX_GENERATED_TOKENS,
    MAX_STEP_TOKENS,
    Budget,
    can_start_from_bigrams,
    choose_budget,
    closing_seconds,
)
from tgen.planning.fine_tuning import (
    PATIENCE,
    WEIGHT_DECAY,
    choose_optimizer,
    learning_rate,
    warmup_steps,
)
from tgen.planning.memory import check_memory, peak_bytes
from tgen.planning.model_size import (
    ModelChoice,
    PlanInputs,
    choose_model,
    keep_model,
    tokens_per_second,
)
from tgen.planning.reasons import explain
from tgen.planning.shapes import matmul_params, n_parameters
from tgen.reports.number_format import count
from tgen.reports.training import Choice

_MIN_TRAIN_TOKENS = 2
_FEW_STEPS = 20
_FEW_TRAIN_TOKENS = 1000  # with fewer, a model can only memorize
CALIBRATION_SHARE = 0.01  # fraction of the time budget
_BYTES_PER_TOKEN = 6
_MIN_CORPUS_BYTES = 1 << 20
_TOKENIZED_BYTES_PER_SECOND = 2e6
_EVALUATION_SHARE = 0.05  # fraction of the time
_EVALUATION_SECONDS = 10.0  # between evaluations at least: each also saves and samples
_EVALUATION_EPOCHS = 3.0  # between evaluations at most: a small corpus is memorized that fast
_LR_TIMES_WIDTH = 0.5  # AdamW's learning rate decreases with the width of the updated vectors
_EMBEDDING_FACTOR = 8  # of the rate of an embedding of its own: a row has few gradients
_MATRIX_LEARNING_RATE = 0.03
_MOMENTUM, _MOMENTUM_OF_SHORT_RUNS, _SHORT_STEPS = 0.95, 0.9, 1000
_WARMUP_STEPS = 50
_MIN_SPEEDUP = 1.05  # of bfloat16 products: less may be noise
_EVAL_TOKENS = 1 << 18
_PATIENCE = 5
_MIN_EVAL_EVERY = 20  # steps, in long epochs of fine-tuning
_MEMORY_SHARE = 0.5  # of the memory: a run that needs more computes activations again


class Regularization(NamedTuple):
    """Hyperparameters against memorization, up to a number of epochs times parameters per token."""

    up_to: float
    dropout: float
    bpe_dropout: float
    bpe_dropout_in_decay: bool
    weight_decay: float


_REGULARIZATION = [
    Regularization(2, 0.0, 0.0, False, 0.1),
    Regularization(5, 0.0, 0.1, False, 0.1),
    Regularization(15, 0.0, 0.2, False, 0.1),
    Regularization(160, 0.1, 0.2, False, 0.1),
    Regularization(400, 0.2, 0.2, True, 0.1),
    Regularization(math.inf, 0.3, 0.3, True, 0.1),
]
_REGULARIZATION_WITHOUT_BPE_DROPOUT = [
    Regularization(50, 0.0, 0.0, False, 0.1),
    Regularization(300, 0.1, 0.0, False, 0.1),
    Regularization(math.inf, 0.2, 0.0, False, 0.5),
]


@dataclass(frozen=True)
class Plan:
    """The model, the hyperparameters, the reasons for them, and notes for the user."""

    size: str
    model: ModelConfig
    train: ResolvedTrainConfig
    context_length: int  # tokens per training window: the model's context length or fewer
    closing_seconds: float = 0.0  # for the last evaluation, the samples and the saving
    tokens_per_second: float = 0.0  # expected
    general_texts: int = 0  # that the base model writes, see `SideWork`
    general_tokens: int = 0  # of these or of the user's text
    generated_tokens: int = MAX_GENERATED_TOKENS  # limit for a sample
    evaluated_tokens: int | None = None  # limit for each evaluation; None: no limit
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def usable_bytes(
    size: str | None,
    train: TrainConfig,
    flops_per_second: float,
    start_from: ModelConfig | None,
) -> int:
    """Return the bytes of text for one epoch and some more; a longer corpus is subsampled."""
    shape = SIZES["tiny" if size is None else size]
    model = start_from or ModelConfig.of("qwen3", **shape, vocab_size=1024)
    if train.steps is not None:
        step_tokens = (train.batch_size or 0) * model.context_length or MAX_STEP_TOKENS
        tokens: float = train.steps * step_tokens
        return max(_MIN_CORPUS_BYTES, round(tokens * _BYTES_PER_TOKEN))
    tokens = 60 * train.minutes * tokens_per_second(flops_per_second, matmul_params(model))
    tokenized = _TOKENIZED_BYTES_PER_SECOND * train.minutes * 60 / 10  # in a tenth of the time
    return max(_MIN_CORPUS_BYTES, round(min(tokens * _BYTES_PER_TOKEN, tokenized)))


def make_plan(
    *,
    family: str,
    size: str | None,
    train: TrainConfig,
    model_fields: dict[str, Any],
    inputs: PlanInputs,
    start_from: ModelConfig | None = None,
) -> Plan:
    """Choose the model, unless it fine-tunes `start_from`, and the fields of `train` that are None.

    Raises UsageError for contradictory values, CorpusError for a corpus that is too short to learn
    from or shorter than a context length that is set.
    """
    if inputs.train_tokens < _MIN_TRAIN_TOKENS:
        raise CorpusError(
            f"the corpus is too short (training tokens: {inputs.train_tokens})",
            f"use a longer text: at least {_MIN_TRAIN_TOKENS} tokens, preferably 100,000 or more",
        )
    precision = train.precision or choose_precision(train, inputs)
    inputs = replace(inputs, flops_per_second=inputs.speed(precision))
    fine_tuning = start_from is not None
    explicit = {name: value for name, value in vars(train).items() if value is not None}
    optimizer: Optimizer = train.optimizer or "muon"
    if fine_tuning:
        optimizer = choose_optimizer(train, inputs.source_optimizer)
    train = replace(train, optimizer=optimizer)
    if start_from is not None:
        choice = keep_model(start_from, fields=model_fields, inputs=inputs)
    else:
        choice = choose_model(family, size, train=train, fields=model_fields, inputs=inputs)
    budget = choose_budget(choice, train, inputs, precision, fine_tuning=fine_tuning)
    chosen = _choose(choice, train, budget, inputs, fine_tuning=fine_tuning)
    chosen |= {"precision": precision, "optimizer": optimizer}
    config = ResolvedTrainConfig(**chosen | explicit)
    if train.activation_checkpointing is None:
        config = replace(config, activation_checkpointing=_needs_memory(config, choice, inputs))
    _check(config, choice, budget, inputs, fine_tuning=fine_tuning)
    eval_tokens = min(inputs.val_tokens, config.eval_tokens)
    notes = []
    if train.steps is None and budget.steps < _FEW_STEPS and budget.steps != config.max_steps:
        notes.append(
            f"only {count(budget.steps, 'step')} will fit into "
            f"{train.minutes:g} minute{'s' * (train.minutes != 1)}, which may be exceeded: "
            "a smaller model, shorter or fewer windows, or more --minutes learn more"
        )
    if inputs.train_tokens < _FEW_TRAIN_TOKENS:
        notes.append(
            f"the corpus is very short ({inputs.train_tokens:,} training tokens): "
            "the model can only memorize it"
        )
    n_more = inputs.val_tokens if eval_tokens < inputs.val_tokens else 0  # see `final_reports`
    if n_more > (budget.side_work.evaluated_tokens or n_more):
        n_more = 0
        notes.append(
            f"evaluations use about {eval_tokens:,} held-out tokens; all would take too long"
        )
    if n_more and config.eval_every < budget.steps:
        notes.append(
            f"until the last, evaluations use about {eval_tokens:,} held-out tokens, spread evenly"
        )
    return Plan(
        choice.size,
        choice.model,
        config,
        choice.context_length,
        closing_seconds(
            eval_tokens + n_more,
            budget.step_tokens,
            budget.tokens_per_second,
            budget.side_work,
            has_rows=inputs.train_rows is not None,
        ),
        budget.tokens_per_second,
        **budget.side_work._asdict(),
        choices=explain(
            choice, config, budget, inputs, explicit=explicit.keys(), fine_tuning=fine_tuning
        ),
        notes=notes,
    )


def choose_precision(train: TrainConfig, inputs: PlanInputs) -> Precision:
    """Return the faster precision of products; float32 if the difference is small.

    With `steps`, measurements must not change the run: bfloat16 where the hardware supports it.
    """
    if train.steps is not None and inputs.bfloat16_flops_per_second is not None:
        return "bfloat16"
    speed = inputs.bfloat16_flops_per_second or 0.0
    return "bfloat16" if speed > _MIN_SPEEDUP * inputs.flops_per_second else "float32"


def _choose(
    choice: ModelChoice,
    train: TrainConfig,
    budget: Budget,
    inputs: PlanInputs,
    *,
    fine_tuning: bool,
) -> dict[str, Any]:
    """Return all hyperparameters that depend on the corpus, the time and the machine."""
    if fine_tuning:
        return _choose_fine_tuning(choice, train, budget, inputs)
    table = _REGULARIZATION
    if not inputs.has_merges or train.bpe_dropout == 0:
        table = _REGULARIZATION_WITHOUT_BPE_DROPOUT
    repetition = budget.epochs * budget.params_per_token
    regularization = next(entry for entry in table if repetition <= entry.up_to)._asdict()
    del regularization["up_to"]
    eval_tokens = train.eval_tokens or _choose_eval_tokens(train, budget)
    rate = train.learning_rate or _LR_TIMES_WIDTH / max(64, choice.model.d_model)
    untied = not choice.model.tied_embeddings
    return {
        **regularization,
        "batch_size": budget.step_tokens // choice.context_length,
        "learning_rate": rate,
        "embedding_learning_rate": rate * (_EMBEDDING_FACTOR if untied else 1),
        "momentum": _MOMENTUM_OF_SHORT_RUNS if budget.steps < _SHORT_STEPS else _MOMENTUM,
        "beta1": 0.8 if untied else 0.9,
        "beta2": 0.95 if untied else 0.98,
        "bigram_start": can_start_from_bigrams(choice.model),
        "temperature_scaling": not choice.model.post_norm,
        "matrix_learning_rate": _MATRIX_LEARNING_RATE,
        "muon_scale": "spectral",
        "patience": _PATIENCE,
        "warmup_steps": min(_WARMUP_STEPS, budget.steps // 10),
        "eval_every": _choose_eval_every(eval_tokens, train, budget, inputs),
        "eval_tokens": eval_tokens,
    }


def _choose_fine_tuning(
    choice: ModelChoice, train: TrainConfig, budget: Budget, inputs: PlanInputs
) -> dict[str, Any]:
    """Return the hyperparameters of a run from pretrained weights: see `fine_tuning`."""
    is_lora = train.lora is not None
    rate = train.learning_rate or learning_rate(n_parameters(choice.model), lora=is_lora)
    limit = budget.side_work.evaluated_tokens or _EVAL_TOKENS
    eval_tokens = train.eval_tokens or min(_EVAL_TOKENS, limit)
    half_epoch = math.ceil(inputs.train_tokens / budget.step_tokens / 2)
    eval_every = half_epoch  # twice per epoch, and more often in long ones
    if inputs.val_tokens:
        share = min(inputs.val_tokens, eval_tokens) / 3 / _EVALUATION_SHARE / budget.step_tokens
        eval_every = min(half_epoch, max(_MIN_EVAL_EVERY, round(share)))
    return {
        "dropout": 0.0,
        "bpe_dropout": 0.0,
        "bpe_dropout_in_decay": False,
        "weight_decay": 0.0 if is_lora else WEIGHT_DECAY,
        "batch_size": budget.step_tokens // choice.context_length,
        "learning_rate": rate,
        "embedding_learning_rate": rate,
        "matrix_learning_rate": rate,
        "muon_scale": "adamw",
        "momentum": _MOMENTUM_OF_SHORT_RUNS if budget.steps < _SHORT_STEPS else _MOMENTUM,
        "beta1": 0.9,
        "beta2": 0.98,
        "bigram_start": False,
        "temperature_scaling": False,
        "warmup_steps": warmup_steps(budget.steps),
        "max_steps": None if train.steps is not None else budget.max_steps,
        "patience": PATIENCE,
        # With the clock, the run may have more steps than planned: one evaluation, at its end.
        "eval_every": max(1, min(eval_every, budget.steps * (1 if train.steps is not None else 2))),
        "eval_tokens": eval_tokens,
    }


def _needs_memory(config: ResolvedTrainConfig, choice: ModelChoice, inputs: PlanInputs) -> bool:
    """Whether a step that stores all activations would take most of the memory."""
    available = inputs.memory if inputs.memory is not None else inputs.rank_memory
    if available is None:
        return False
    needed = peak_bytes(
        choice.model,
        config,
        choice.context_length,
        inputs.frozen,
        n_ranks=inputs.n_ranks,
        on_gpu=not inputs.on_cpu,
    )
    return needed > _MEMORY_SHARE * available


def _check(
    config: ResolvedTrainConfig,
    choice: ModelChoice,
    budget: Budget,
    inputs: PlanInputs,
    *,
    fine_tuning: bool,
) -> None:
    """Reject invalid combinations of valid values."""
    if config.bpe_dropout > 0 and not inputs.has_merges:
        raise UsageError(
            f"bpe_dropout={config.bpe_dropout:g}: this tokenizer has no BPE merges",
            "remove bpe_dropout, or train with --tokenizer bpe",
        )
    if config.steps is not None and config.max_steps is not None:
        raise UsageError(
            f"max_steps={config.max_steps} cannot be combined with --steps {config.steps}",
            "remove one of them: max_steps limits the steps of --minutes",
        )
    if config.bigram_start and fine_tuning:
        raise UsageError(
            "bigram_start=true: fine-tuning starts from the base model",
            "remove bigram_start, or train without --from",
        )
    if config.bigram_start and not can_start_from_bigrams(choice.model):
        raise UsageError(
            "bigram_start=true: this model cannot start from bigrams",
            "remove bigram_start: it needs --family qwen3, tied_embeddings=false and a vocabulary "
            "of at most 8,192 tokens",
        )
    if config.temperature_scaling and (choice.model.post_norm or config.lora is not None):
        raise UsageError(
            "temperature_scaling=true cannot be combined with post-norm models (classic) or LoRA",
            "remove --set temperature_scaling=true",
        )
    if budget.steps <= config.warmup_steps:
        raise UsageError(
            f"warmup_steps={config.warmup_steps}: expected fewer than the {budget.steps} steps",
            "set fewer, or let the plan choose",
        )
    needs = choice.model, config, choice.context_length, inputs.memory
    check_memory(*needs, frozen=inputs.frozen)


def _choose_eval_tokens(train: TrainConfig, budget: Budget) -> int:
    if train.steps is not None:
        return _EVAL_TOKENS
    # A token costs about a third of one in a step. One evaluation must fit into its share.
    in_time = budget.steps * budget.step_tokens * _EVALUATION_SHARE * 3
    return max(1, min(_EVAL_TOKENS, round(in_time)))


def _choose_eval_every(
    eval_tokens: int, train: TrainConfig, budget: Budget, inputs: PlanInputs
) -> int:
    tokens = min(inputs.val_tokens, eval_tokens) / 3 / _EVALUATION_SHARE
    if train.steps is None:  # the same number of steps is the same run on every machine
        tokens = max(tokens, _EVALUATION_SECONDS * budget.tokens_per_second)
    tokens = min(tokens, _EVALUATION_EPOCHS * inputs.train_tokens)
    return max(20, round(tokens / budget.step_tokens))
