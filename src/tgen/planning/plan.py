"""The plan for a corpus, a time budget and a machine, with the reasons for each choice."""

from dataclasses import dataclass, field, replace
from typing import Any

from tgen.config import SIZES, ModelConfig
from tgen.config.option import MAX_WHOLE
from tgen.config.training import ResolvedTrainConfig, TrainConfig, settings_without_effect
from tgen.errors import CorpusError, UsageError
from tgen.planning.batch_size import MAX_STEP_TOKENS
from tgen.planning.budget import Budget, choose_budget
from tgen.planning.costs import matmul_params
from tgen.planning.fine_tuning import choose_optimizer
from tgen.planning.hyperparameters import (
    MAX_BIGRAM_VOCABULARY,
    can_start_from_bigrams,
    choose_hyperparameters,
    choose_precision,
)
from tgen.planning.memory import check_memory
from tgen.planning.model_size import (
    PlanInputs,
    PlannedRun,
    choose_model,
    keep_model,
    tokens_per_second,
)
from tgen.planning.side_work import MAX_GENERATED_TOKENS, closing_seconds
from tgen.reports.number_format import count
from tgen.reports.training import Choice

_MIN_TRAIN_TOKENS = 2
_FEW_STEPS = 20
_FEW_TRAIN_TOKENS = 1000  # with fewer, a model can only memorize
CALIBRATION_SHARE = 0.01  # fraction of the time budget
_BYTES_PER_TOKEN = 6
_MIN_CORPUS_BYTES = 1 << 20
_TOKENIZED_BYTES_PER_SECOND = 2e6


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
    ends_when_learned: bool = False  # once every answer is reproduced: see early_stopping
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
        tokens = train.steps * step_tokens
        return max(_MIN_CORPUS_BYTES, min(MAX_WHOLE, tokens * _BYTES_PER_TOKEN))
    in_time = 60 * train.minutes * tokens_per_second(flops_per_second, matmul_params(model))
    tokenized = _TOKENIZED_BYTES_PER_SECOND * train.minutes * 60 / 10  # in a tenth of the time
    return max(_MIN_CORPUS_BYTES, round(min(in_time * _BYTES_PER_TOKEN, tokenized)))


def make_plan(
    *,
    family: str,
    size: str | None,
    parameters: int | None = None,
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
    precision, why_precision = choose_precision(train, inputs)
    inputs = replace(inputs, flops_per_second=inputs.speed(precision))
    if start_from is not None:
        train = replace(train, optimizer=choose_optimizer(train, inputs.source_optimizer))
        choice = keep_model(start_from, fields=model_fields, inputs=inputs)
    else:
        train = replace(train, optimizer=train.optimizer or "muon")
        choice = choose_model(
            family, size, parameters=parameters, train=train, fields=model_fields, inputs=inputs
        )
    run = PlannedRun(choice, train, inputs, precision, why_precision, start_from is not None)
    budget = choose_budget(run)
    config, choices = choose_hyperparameters(run, budget)
    check_settings(
        config,
        choice.model,
        steps=budget.steps,
        has_merges=inputs.has_merges,
        fine_tuning=run.fine_tuning,
    )
    check_memory(choice.model, config, run.context, inputs.memory, frozen=inputs.frozen)
    n_more = _more_eval_tokens(config, run, budget)
    eval_tokens = min(inputs.val_tokens, config.eval_tokens) + n_more
    return Plan(
        choice.size,
        choice.model,
        config,
        choice.context_length,
        closing_seconds(
            run, eval_tokens, budget.step_tokens, budget.tokens_per_second, budget.side_work
        ),
        budget.tokens_per_second / config.passes,
        **budget.side_work._asdict(),
        ends_when_learned=inputs.n_answers > 0 and inputs.longest_row <= run.context,
        choices=choices,
        notes=_notes(config, run, budget, n_more),
    )


def _more_eval_tokens(config: ResolvedTrainConfig, run: PlannedRun, budget: Budget) -> int:
    """Return the tokens to evaluate the saved model on, if that is more than an evaluation's."""
    n = min(run.inputs.val_tokens, budget.side_work.evaluated_tokens or run.inputs.val_tokens)
    return n if n > config.eval_tokens else 0


def _notes(config: ResolvedTrainConfig, run: PlannedRun, budget: Budget, n_more: int) -> list[str]:
    train, inputs, steps = run.train, run.inputs, budget.steps
    unused = settings_without_effect(
        train.changed, config, run.model, has_val=inputs.val_tokens > 0
    )
    notes = [f"{name} has no effect without {needed}" for name, needed in unused.items()]
    if train.steps is None and steps < _FEW_STEPS and steps != config.max_steps:
        notes.append(
            f"only {count(steps, 'step')} will fit into "
            f"{train.minutes:g} minute{'s' * (train.minutes != 1)}, which may be exceeded: "
            "a smaller model, shorter or fewer windows, or more --minutes learn more"
        )
    if inputs.train_tokens < _FEW_TRAIN_TOKENS:
        notes.append(
            f"the corpus is very short ({inputs.train_tokens:,} training tokens): "
            "the model can only memorize it"
        )
    evaluated = f"evaluations use about {config.eval_tokens:,} held-out tokens"
    if config.eval_tokens < inputs.val_tokens and n_more < inputs.val_tokens:
        last = f", the last one up to {n_more:,}" if n_more else ""
        notes.append(f"{evaluated}{last}; all would take too long")
    elif n_more and config.eval_every < steps:
        notes.append(f"until the last, {evaluated}, spread evenly")
    return notes


def check_settings(
    config: ResolvedTrainConfig,
    model: ModelConfig,
    *,
    steps: int | None,
    has_merges: bool,
    fine_tuning: bool,
) -> None:
    """Raise UsageError for valid values in invalid combinations; `steps` are those of the run,
    None if they are unknown."""
    if config.bpe_dropout > 0 and not has_merges:
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
    if config.bigram_start and not can_start_from_bigrams(model):
        raise UsageError(
            "bigram_start=true: this model cannot start from bigrams",
            "remove bigram_start: it needs --family qwen3, tied_embeddings=false and a vocabulary "
            f"of at most {MAX_BIGRAM_VOCABULARY:,} tokens",
        )
    if config.temperature_scaling and (not model.scales_logits or config.lora is not None):
        raise UsageError(
            "temperature_scaling=true cannot be combined with LoRA or with models without a weight "
            "of a final norm (classic, olmo)",
            "remove --set temperature_scaling=true",
        )
    if steps is not None and steps <= config.warmup_steps:
        raise UsageError(
            f"warmup_steps={config.warmup_steps}: expected fewer than the {steps} steps",
            "set fewer, or let the plan choose",
        )
