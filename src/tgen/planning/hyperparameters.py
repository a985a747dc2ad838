"""The hyperparameters that follow from a run's model and budget, each with its reason.

docs/learning.md has the measurements behind the thresholds; some are interpolated.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from tgen.config import ModelConfig
from tgen.config.training import Precision, ResolvedTrainConfig, TrainConfig
from tgen.planning.budget import Budget
from tgen.planning.costs import n_parameters
from tgen.planning.fine_tuning import (
    MIN_WARMUP_STEPS,
    PATIENCE,
    WEIGHT_DECAY,
    explain_rate,
    learning_rate,
    warmup_steps,
)
from tgen.planning.memory import peak_bytes
from tgen.planning.model_size import EXPLICIT, PlanInputs, PlannedRun
from tgen.planning.side_work import SHARE, TEXT_TOKENS, choose_eval_every, choose_eval_tokens
from tgen.reports.number_format import count, format_bytes, format_number
from tgen.reports.training import Choice

_LR_TIMES_WIDTH = 0.5  # AdamW's learning rate decreases with the width of the updated vectors
_EMBEDDING_FACTOR = 8  # of the rate of an embedding of its own: a row has few gradients
_MOMENTUM, _MOMENTUM_OF_SHORT_RUNS, _SHORT_STEPS = 0.95, 0.9, 1000
_WARMUP_STEPS = 50
_MIN_SPEEDUP = 1.05  # of bfloat16 products: less may be noise
_MEMORY_SHARE = 0.5  # of the memory: a run that needs more computes activations again
MAX_BIGRAM_VOCABULARY = 8192  # tokens; a start from more bigrams would need gigabytes


class Regularization(NamedTuple):
    """Hyperparameters against memorization, up to a number of epochs times parameters per token."""

    up_to: float
    dropout: float
    bpe_dropout: float
    bpe_dropout_in_decay: bool
    weight_decay: float
    consistency: float = 0.0


_REGULARIZATION = [
    Regularization(2, 0.0, 0.0, False, 0.1),
    Regularization(5, 0.0, 0.1, False, 0.1),
    Regularization(15, 0.0, 0.2, False, 0.1),
    Regularization(160, 0.1, 0.2, False, 0.1),
    Regularization(400, 0.2, 0.2, True, 0.1),
    Regularization(800, 0.2, 0.2, True, 0.1, consistency=1.5),
    Regularization(math.inf, 0.2, 0.3, True, 0.1, consistency=1.5),
    Regularization(math.inf, 0.3, 0.3, True, 0.1),  # without R-Drop
]
_REGULARIZATION_WITHOUT_BPE_DROPOUT = [
    Regularization(50, 0.0, 0.0, False, 0.1),
    Regularization(300, 0.1, 0.0, False, 0.1),
    Regularization(math.inf, 0.2, 0.0, False, 0.5),
]


class Reasons(NamedTuple):
    """The reasons for hyperparameters that the user did not set."""

    start: str
    learning_rate: str
    dropout: str
    bpe_dropout: str


def choose_precision(train: TrainConfig, inputs: PlanInputs) -> tuple[Precision, str]:
    """Return the faster precision of products, float32 if the difference is small, and the reason.

    With `steps`, measurements must not change the run: bfloat16 where the hardware supports it.
    """
    if train.precision is not None:
        return train.precision, EXPLICIT
    if inputs.bfloat16_flops_per_second is None:
        return "float32", "the hardware does not support bfloat16"
    if train.steps is not None:
        return "bfloat16", "the hardware supports it; weights are float32"
    if inputs.bfloat16_flops_per_second > _MIN_SPEEDUP * inputs.flops_per_second:
        why = "matrix multiplication in bfloat16 is faster on this machine; weights are float32"
        return "bfloat16", why
    return "float32", "matrix multiplication in bfloat16 is not faster on this machine"


def can_start_from_bigrams(config: ModelConfig) -> bool:
    """Whether the logits of a model with blocks of zeros are a product of its two tables."""
    return (
        not config.tied_embeddings
        and config.position == "rotary"
        and config.norm == "rms_norm"
        and config.norm_placement == "pre"
        and config.embedding_scale == config.logits_divisor == 1
        and config.vocab_size <= MAX_BIGRAM_VOCABULARY
    )


def choose_hyperparameters(
    run: PlannedRun, budget: Budget
) -> tuple[ResolvedTrainConfig, list[Choice]]:
    """Return a run's hyperparameters, the user's included, and the table of all choices."""
    choose = _choose_fine_tuning if run.fine_tuning else _choose_new
    chosen, reasons = choose(run, budget)
    side_work, steps, step_tokens = budget.side_work, budget.steps, budget.step_tokens
    eval_tokens = choose_eval_tokens(run, side_work, steps * step_tokens)
    eval_every, why_evaluation = choose_eval_every(
        run, eval_tokens, steps, step_tokens, budget.tokens_per_second
    )
    windows = budget.step_tokens // run.context
    passes = replace(chosen, **run.train.explicit).passes
    if passes > 1 and run.train.batch_size is None:
        n_ranks = run.inputs.n_ranks
        windows = max(windows // passes // n_ranks, 1) * n_ranks
        windows = max(windows, run.train.accumulation)
    shared = {
        "batch_size": windows,
        "momentum": _MOMENTUM_OF_SHORT_RUNS if budget.steps < _SHORT_STEPS else _MOMENTUM,
        "eval_every": eval_every,
        "eval_tokens": eval_tokens,
    }
    config = replace(chosen, **shared | run.train.explicit | {"precision": run.precision})
    if run.train.activation_checkpointing is None:
        config = replace(config, activation_checkpointing=_needs_memory(config, run))
    return config, _table(config, run, budget, reasons, why_evaluation)


def _choose_new(run: PlannedRun, budget: Budget) -> tuple[ResolvedTrainConfig, Reasons]:
    """Choose the hyperparameters of a new model."""
    train, inputs, untied = run.train, run.inputs, not run.model.tied_embeddings
    table = _REGULARIZATION
    if not inputs.has_merges or train.bpe_dropout == 0:
        table = _REGULARIZATION_WITHOUT_BPE_DROPOUT
    repetition = budget.epochs * budget.params_per_token
    windows = budget.step_tokens // run.context // inputs.n_ranks
    is_free = 0 not in (train.consistency, train.dropout) and train.batch_size is None
    is_free &= windows > 1  # half of them, computed twice, take as long
    regularization = next(
        entry for entry in table if repetition <= entry.up_to and (is_free or not entry.consistency)
    )
    if inputs.memorizes_rows:
        regularization = table[0]
    bigram_start = can_start_from_bigrams(run.model)
    rate = train.learning_rate or _LR_TIMES_WIDTH / max(64, run.model.d_model)
    why_start, why_bpe_dropout = "tied embeddings start at random", "the tokenizer has no merges"
    if inputs.train_rows is not None:
        why_bpe_dropout = "rows of conversations have none"
    if bigram_start:
        why_start = "embedding and LM head are initialized from the corpus's bigram statistics"
    elif untied:
        why_start = (
            "a bigram start needs the family qwen3 or llama and a vocabulary of at most "
            f"{MAX_BIGRAM_VOCABULARY:,}"
        )
    if regularization.bpe_dropout > 0:
        why_bpe_dropout = "probability of splitting a token, so that epochs differ"
    elif inputs.has_merges:
        why_bpe_dropout = "few epochs"
    consistency = train.consistency or regularization.consistency
    n_epochs = budget.epochs / (2 if consistency else 1)
    params, epochs = format_number(budget.params_per_token), format_number(n_epochs)
    why_dropout = f"{params} parameters per training token, {epochs} epochs"
    if inputs.memorizes_rows:
        why_dropout = "nothing is held out: the answers are to be memorized"
    config = ResolvedTrainConfig(
        dropout=regularization.dropout,
        consistency=regularization.consistency,
        bpe_dropout=regularization.bpe_dropout,
        bpe_dropout_in_decay=regularization.bpe_dropout_in_decay,
        weight_decay=regularization.weight_decay,
        learning_rate=rate,
        embedding_learning_rate=rate * (_EMBEDDING_FACTOR if untied else 1),
        beta1=0.8 if untied else 0.9,
        beta2=0.95 if untied else 0.98,
        bigram_start=bigram_start,
        temperature_scaling=run.model.scales_logits,
        warmup_steps=min(_WARMUP_STEPS, budget.steps // 10),
    )
    return config, Reasons(why_start, "", why_dropout, why_bpe_dropout)


def _choose_fine_tuning(run: PlannedRun, budget: Budget) -> tuple[ResolvedTrainConfig, Reasons]:
    """Choose the hyperparameters of a run from pretrained weights: see `fine_tuning`."""
    train, is_lora = run.train, run.train.lora is not None
    rate, why_rate = train.learning_rate, ""
    if rate is None:
        rate = learning_rate(n_parameters(run.model), lora=is_lora)
        why_rate = explain_rate(train)
    why_dropout = f"not used for fine-tuning; {format_number(budget.epochs)} epochs"
    config = ResolvedTrainConfig(
        weight_decay=0.0 if is_lora else WEIGHT_DECAY,
        learning_rate=rate,
        embedding_learning_rate=rate,
        matrix_learning_rate=rate,
        muon_scale="adamw",
        warmup_steps=warmup_steps(MIN_WARMUP_STEPS if run.inputs.memorizes_rows else budget.steps),
        max_steps=None if train.steps is not None else budget.max_steps,
        patience=PATIENCE,
    )
    return config, Reasons("fine-tuning", why_rate, why_dropout, "not used for fine-tuning")


def _needs_memory(config: ResolvedTrainConfig, run: PlannedRun) -> bool:
    """Whether a step that stores all activations would take most of the memory."""
    memory = run.inputs.memory
    available = memory if memory is not None else run.inputs.rank_memory
    return available is not None and _peak_bytes(config, run) > _MEMORY_SHARE * available


def _peak_bytes(config: ResolvedTrainConfig, run: PlannedRun) -> int:
    frozen, n, on_gpu = run.inputs.frozen, run.inputs.n_ranks, not run.inputs.on_cpu
    return peak_bytes(run.model, config, run.context, frozen, n_ranks=n, on_gpu=on_gpu)


def _table(
    config: ResolvedTrainConfig,
    run: PlannedRun,
    budget: Budget,
    reasons: Reasons,
    why_evaluation: str,
) -> list[Choice]:
    """Return the rows of the plan's table."""
    choice, train = run.choice, run.train
    windows = count(config.batch_size, "window")
    step_tokens = count(config.batch_size * run.context, "token")
    start = "bigrams" if config.bigram_start else "random"
    start = "the base model" if run.fine_tuning else start
    rates = train.learning_rate, train.embedding_learning_rate, train.matrix_learning_rate
    rows = [
        Choice("size", choice.size, choice.why_size),
        Choice("context", count(run.context, "token"), choice.why_context),
        _row("batch", windows, f"{step_tokens} per step", train.batch_size),
        Choice("precision", config.precision, run.why_precision),
        *_lora(config, run),
        _row("start", start, reasons.start, train.bigram_start),
        _row("learning rate", *_learning_rate(config, reasons), *rates),
        _row("dropout", f"{config.dropout:g}", reasons.dropout, train.dropout),
        *_consistency(config, train),
        _row("BPE-dropout", f"{config.bpe_dropout:.0%}", reasons.bpe_dropout, train.bpe_dropout),
        Choice("steps", _steps(budget, train), budget.why_steps),
        _evaluation(config, run, budget, why_evaluation),
    ]
    if run.fine_tuning:
        rows.append(_general_text(run, budget))
    if run.fine_tuning and run.inputs.on_cpu:
        why = "all activations are stored"
        if config.activation_checkpointing:
            why = "activations are computed again in the backward pass"
        value = f"{format_bytes(_peak_bytes(config, run))} at most"
        rows.append(_row("memory", value, why, train.activation_checkpointing))
    return rows


def _row(name: str, value: str, why: str, *settings: object) -> Choice:
    """Return a choice whose reason is `why` unless the user has made all `settings`."""
    return Choice(name, value, why if None in settings else EXPLICIT)


def _consistency(config: ResolvedTrainConfig, train: TrainConfig) -> list[Choice]:
    if config.passes == 1:
        return []
    why = "each window is computed twice, with two dropout masks"
    return [_row("R-Drop", f"{config.consistency:g}", why, train.consistency)]


def _lora(config: ResolvedTrainConfig, run: PlannedRun) -> list[Choice]:
    if config.lora is None or run.inputs.frozen is None:
        return []
    n_trained = sum(rows * columns for rows, columns in run.inputs.frozen.adapter)
    share = n_trained / n_parameters(run.model)
    parts = {"all": "all matrices of the blocks", "attention": "the matrices of attention"}
    targets = parts.get(config.lora_targets, "the matrices of the feed-forward layers")
    value = f"rank {config.lora}, {n_trained / 1e6:.2f} M parameters"
    return [
        Choice("LoRA", value, f"{share:.1%} of the model; alpha {config.lora_alpha:g}, {targets}")
    ]


def _learning_rate(config: ResolvedTrainConfig, reasons: Reasons) -> tuple[str, str]:
    value = f"AdamW {config.learning_rate:g}"
    if config.embedding_learning_rate != config.learning_rate:
        value += f", embedding {config.embedding_learning_rate:g}"
    if config.optimizer == "muon":
        value = f"Muon {config.matrix_learning_rate:g}, {value}"
    warmup = f"warmup until step {config.warmup_steps}, " if config.warmup_steps else ""
    decay = f"decay over the last {config.decay_fraction:.0%}"
    return value, f"{reasons.learning_rate}{warmup}{decay}"


def _steps(budget: Budget, train: TrainConfig) -> str:
    if train.steps is not None:
        return f"{budget.steps:,}"
    if budget.steps == budget.max_steps:
        return f"at most {budget.steps:,}"
    return f"about {round(budget.steps, -max(0, len(str(budget.steps)) - 2)):,}"


def _evaluation(config: ResolvedTrainConfig, run: PlannedRun, budget: Budget, why: str) -> Choice:
    every = f"every {config.eval_every} step{'s' * (config.eval_every > 1)}"
    if run.inputs.n_answers:
        n = count(run.inputs.n_answers, "answer")
        return Choice(
            "evaluation", every, f"training ends once {n} came out exactly twice in a row"
        )
    if run.inputs.val_tokens == 0:
        return Choice("evaluation", "none", f"checkpoint {every}")
    if config.eval_every >= budget.steps:
        return _row("evaluation", "once", "at the end", run.train.eval_every)
    return _row("evaluation", every, why, run.train.eval_every)


def _general_text(run: PlannedRun, budget: Budget) -> Choice:
    n_texts, n_tokens = budget.side_work.general_texts, budget.side_work.general_tokens
    if n_tokens < 2 and not n_texts:
        why = "writing one would take too long; --general FILE names one"
        why = "the only token of the user's text follows no other" if n_tokens else why
        return Choice("general text", "none", why)
    value, why = count(n_tokens, "token"), "of the user's text"
    if n_texts:
        value, why = f"{n_texts:,} texts of {TEXT_TOKENS} tokens", "written by the base model"
    share = "" if run.train.steps is not None else f", at most {SHARE:.0%} of the time"
    return Choice("general text", value, f"{why} to measure forgetting{share}")
