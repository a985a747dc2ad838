"""The table of the plan: every choice with its reason."""

from collections.abc import Set
from dataclasses import replace

from tgen.config.training import ResolvedTrainConfig
from tgen.planning.budget import SHARE, TEXT_TOKENS, Budget, SideWork
from tgen.planning.fine_tuning import explain_rate
from tgen.planning.memory import peak_bytes
from tgen.planning.model_size import EXPLICIT, ModelChoice, PlanInputs
from tgen.planning.shapes import n_parameters
from tgen.reports.number_format import count, format_bytes, format_number
from tgen.reports.training import Choice

# Fields of TrainConfig behind a choice.
_FIELDS = {
    "batch": {"batch_size"},
    "memory": {"activation_checkpointing"},
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
    windows = count(config.batch_size, "window")
    params, epochs = format_number(budget.params_per_token), format_number(budget.epochs)
    is_lora = config.lora is not None
    speed = f"this machine trains at {inputs.flops_per_second / 1e9:,.0f} GFLOP/s"
    if inputs.measured_step is not None:
        seconds = inputs.measured_step.seconds_of(budget.step_tokens)
        speed = f"a step takes {format_number(seconds)} seconds here"
    choices = [
        Choice("size", choice.size, choice.why_size),
        Choice("context", f"{choice.context_length:,} tokens", choice.why_context),
        Choice("batch", windows, f"{budget.step_tokens:,} tokens per step"),
        _precision(config, inputs),
        _start(config, choice, fine_tuning=fine_tuning),
        _learning_rate(config, explicit, fine_tuning=fine_tuning),
        Choice(
            "dropout",
            f"{config.dropout:g}",
            f"not used for fine-tuning; {epochs} epochs"
            if fine_tuning
            else f"{params} parameters per training token, {epochs} epochs",
        ),
        _bpe_dropout(config, inputs, fine_tuning=fine_tuning),
        Choice("steps", *_steps(config, budget, speed, explicit)),
        _evaluation(config, budget, inputs, fine_tuning=fine_tuning),
    ]
    if fine_tuning:
        choices.append(_general_text(budget.side_work, config))
    if fine_tuning and inputs.on_cpu:
        choices.append(_memory(config, choice, inputs))
    if is_lora and inputs.frozen is not None:
        n_trained = sum(rows * columns for rows, columns in inputs.frozen.adapter)
        share = n_trained / n_parameters(choice.model)
        value = f"rank {config.lora}, {n_trained / 1e6:.2f} M parameters"
        why = f"{share:.1%} of the model; alpha {config.lora_alpha:g}, {_targets(config)}"
        choices.insert(4, Choice("LoRA", value, why))
    return [
        replace(one, why=EXPLICIT)
        if one.value != "none" and one.name in _FIELDS and _FIELDS[one.name] <= explicit
        else one
        for one in choices
    ]


def _learning_rate(config: ResolvedTrainConfig, explicit: Set[str], *, fine_tuning: bool) -> Choice:
    value = f"AdamW {config.learning_rate:g}"
    if config.embedding_learning_rate != config.learning_rate:
        value += f", embedding {config.embedding_learning_rate:g}"
    if config.optimizer == "muon":
        value = f"Muon {config.matrix_learning_rate:g}, {value}"
    is_chosen = fine_tuning and "learning_rate" not in explicit
    reason = explain_rate(config) if is_chosen else ""
    warmup = f"warmup until step {config.warmup_steps}, " if config.warmup_steps else ""
    why = f"{reason}{warmup}decay over the last {config.decay_fraction:.0%}"
    return Choice("learning rate", value, why)


def _start(config: ResolvedTrainConfig, choice: ModelChoice, *, fine_tuning: bool) -> Choice:
    if fine_tuning:
        return Choice("start", "the base model", "fine-tuning")
    if config.bigram_start:
        return Choice("start", "bigrams", "embedding and LM head predict as the text's pairs do")
    why = "tied embeddings start at random"
    if not choice.model.tied_embeddings:
        why = "a bigram start needs the family qwen3 or llama and a vocabulary of at most 8,192"
    return Choice("start", "random", why)


def _precision(config: ResolvedTrainConfig, inputs: PlanInputs) -> Choice:
    if config.precision == "bfloat16" and config.steps is not None:
        why = "the hardware supports it; weights are float32"
    elif config.precision == "bfloat16":
        why = "products are faster this way here; weights are float32"
    elif inputs.bfloat16_flops_per_second:
        why = "products of bfloat16 are not faster here"
    else:
        why = "the hardware does not support bfloat16"
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


def _steps(
    config: ResolvedTrainConfig, budget: Budget, speed: str, explicit: Set[str]
) -> tuple[str, str]:
    steps = budget.steps
    if config.steps is not None:
        return f"{steps:,}", speed
    if steps == config.max_steps:
        why = f"{format_number(budget.epochs)} epochs; more would increase forgetting"
        return f"at most {steps:,}", EXPLICIT if "max_steps" in explicit else why
    digits = max(0, len(str(steps)) - 2)
    return f"about {round(steps, -digits):,}", speed


def _general_text(side_work: SideWork, config: ResolvedTrainConfig) -> Choice:
    share = "" if config.steps is not None else f", at most {SHARE:.0%} of the time"
    if n_texts := side_work.general_texts:
        value, why = f"{n_texts:,} texts of {TEXT_TOKENS} tokens", "written by the base model"
    elif side_work.general_tokens:
        value, why = f"{side_work.general_tokens:,} tokens", "of the user's text"
    else:
        return Choice(
            "general text", "none", "writing one would take too long; --general FILE names one"
        )
    return Choice("general text", value, f"{why} to measure forgetting{share}")


def _memory(config: ResolvedTrainConfig, choice: ModelChoice, inputs: PlanInputs) -> Choice:
    needed = peak_bytes(
        choice.model, config, choice.context_length, inputs.frozen, n_ranks=inputs.n_ranks
    )
    why = "all activations are stored"
    if config.activation_checkpointing:
        why = "activations are computed again in the backward pass"
    return Choice("memory", f"{format_bytes(needed)} at most", why)


def _targets(config: ResolvedTrainConfig) -> str:
    parts = {"all": "all matrices of the blocks", "attention": "the matrices of attention"}
    return parts.get(config.lora_targets, "the matrices of the feed-forward layers")


def _evaluation(
    config: ResolvedTrainConfig, budget: Budget, inputs: PlanInputs, *, fine_tuning: bool
) -> Choice:
    every = f"every {config.eval_every} step{'s' * (config.eval_every > 1)}"
    if inputs.val_tokens == 0:
        return Choice("evaluation", "none", f"checkpoint {every}")
    if config.eval_every >= budget.steps:
        return Choice("evaluation", "once", "at the end")
    # A token costs about a third of one in a step.
    tokens = min(inputs.val_tokens, config.eval_tokens) / 3
    epochs = config.eval_every * budget.step_tokens / inputs.train_tokens
    why = "at most 5% of the time"
    if tokens > 0.05 * config.eval_every * budget.step_tokens or epochs > 2.9:
        why = "at least twice per epoch" if fine_tuning else f"{format_number(epochs)} epochs apart"
    return Choice("evaluation", every, why)
