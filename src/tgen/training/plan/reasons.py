"""The table of the plan: every choice with its reason."""

from collections.abc import Set
from dataclasses import replace

from tgen.config import ResolvedTrainConfig
from tgen.reports.number_format import format_number
from tgen.reports.training import Choice
from tgen.training.plan.budget import Budget
from tgen.training.plan.model_size import EXPLICIT, ModelChoice, PlanInputs

# Fields of TrainConfig behind a choice.
_FIELDS = {
    "batch": {"batch_size"},
    "precision": {"precision"},
    "learning rate": {"learning_rate", "embedding_learning_rate", "matrix_learning_rate"},
    "start": {"bigram_start"},
    "dropout": {"dropout"},
    "BPE-dropout": {"bpe_dropout"},
    "evaluation": {"eval_every"},
}


def explain(
    choice: ModelChoice,
    config: ResolvedTrainConfig,
    budget: Budget,
    inputs: PlanInputs,
    *,
    explicit: Set[str],
    fine_tuning: bool,
) -> list[Choice]:
    """Return the choices of a plan; `explicit` are the fields of TrainConfig that the user set."""
    windows = f"{config.batch_size} window{'s' * (config.batch_size > 1)}"
    params, epochs = format_number(budget.params_per_token), format_number(budget.epochs)
    speed = f"this machine trains at {inputs.flops_per_second / 1e9:,.0f} GFLOP/s"
    choices = [
        Choice("size", choice.size, choice.why_size),
        Choice("context", f"{choice.context_length} tokens", choice.why_context),
        Choice("batch", windows, f"{budget.step_tokens:,} tokens per step"),
        _precision(config, inputs),
        _start(config, choice, fine_tuning=fine_tuning),
        _learning_rate(config, fine_tuning=fine_tuning),
        Choice(
            "dropout",
            f"{config.dropout:g}",
            f"{params} parameters per training token, {epochs} epochs",
        ),
        _bpe_dropout(config, inputs, fine_tuning=fine_tuning),
        Choice("steps", _steps(budget.steps, exact=config.steps is not None), speed),
        _evaluation(config, budget, inputs),
    ]
    return [
        replace(one, why=EXPLICIT)
        if one.value != "none" and one.name in _FIELDS and _FIELDS[one.name] <= explicit
        else one
        for one in choices
    ]


def _learning_rate(config: ResolvedTrainConfig, *, fine_tuning: bool) -> Choice:
    value = f"AdamW {config.learning_rate:g}"
    if config.embedding_learning_rate != config.learning_rate:
        value += f", embedding {config.embedding_learning_rate:g}"
    if config.optimizer == "muon":
        value = f"Muon {config.matrix_learning_rate:g}, {value}"
    reduced = "reduced for fine-tuning; " if fine_tuning else ""
    warmup = f"warmup until step {config.warmup_steps}, " if config.warmup_steps else ""
    why = f"{reduced}{warmup}decay over the last {config.decay_fraction:.0%}"
    return Choice("learning rate", value, why)


def _start(config: ResolvedTrainConfig, choice: ModelChoice, *, fine_tuning: bool) -> Choice:
    if fine_tuning:
        return Choice("start", "the base model", "fine-tuning")
    if config.bigram_start:
        return Choice("start", "bigrams", "embedding and LM head predict as the text's pairs do")
    why = "an embedding tied to the LM head has no other start"
    if not choice.model.tied_embeddings:
        why = "a bigram start needs the family qwen3 or llama and a vocabulary of at most 8,192"
    return Choice("start", "random", why)


def _precision(config: ResolvedTrainConfig, inputs: PlanInputs) -> Choice:
    if config.precision == "bfloat16" and config.steps is not None:
        why = "this device has units for it; weights and sums are float32"
    elif config.precision == "bfloat16":
        why = "products are faster this way here; weights and sums are float32"
    elif inputs.bfloat16_flops_per_second:
        why = "products of bfloat16 are not faster here"
    else:
        why = "this device has no units for bfloat16"
    return Choice("precision", config.precision, why)


def _bpe_dropout(config: ResolvedTrainConfig, inputs: PlanInputs, *, fine_tuning: bool) -> Choice:
    if config.bpe_dropout > 0:
        why = "probability of splitting a token, so that epochs differ"
    elif fine_tuning:
        why = "not used for fine-tuning"
    elif inputs.has_merges:
        why = "few epochs"
    else:
        why = "the tokenizer has no merges"
    return Choice("BPE-dropout", f"{config.bpe_dropout:.0%}", why)


def _steps(steps: int, *, exact: bool) -> str:
    if exact:
        return f"{steps:,}"
    digits = max(0, len(str(steps)) - 2)
    return f"about {round(steps, -digits):,}"


def _evaluation(config: ResolvedTrainConfig, budget: Budget, inputs: PlanInputs) -> Choice:
    every = f"every {config.eval_every} step{'s' * (config.eval_every > 1)}"
    if inputs.val_tokens == 0:
        return Choice("evaluation", "none", f"checkpoint {every}")
    if config.eval_every >= budget.steps:
        return Choice("evaluation", "once", "at the end")
    return Choice("evaluation", every, "at most 5% of the time")
