"""What to train for a corpus, the minutes and the machine: pure functions, each with its reasons.

The figures behind the thresholds were measured: `benchmarks/learning/`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tgen.config import SIZES, ModelConfig, TrainConfig
from tgen.errors import CorpusError, UsageError
from tgen.reports import Choice
from tgen.training.plan.budget import Budget, choose_budget
from tgen.training.plan.memory_check import check_memory
from tgen.training.plan.model_size import (
    PlanInputs,
    Shape,
    choose_shape,
    given_shape,
    matmul_params,
    tokens_per_second,
)
from tgen.training.plan.overrides import parse_overrides
from tgen.training.plan.reasons import explain

CALIBRATION_SHARE = 0.01  # of the minutes
_BPE_FROM_BYTES = 10_000  # a smaller text repeats too few words to learn them as tokens
_SMALL_BYTES = 200_000  # and one smaller than this has too few for more than 512 tokens
_BYTES_PER_TOKEN = 6
_READ_AT_LEAST = 1 << 20  # bytes
_TOKENISED_A_SECOND = 2e6  # bytes
_SAMPLING_SECONDS = 0.3  # at least: a token at a time, however small the model is
_EVALUATION_SHARE = 0.05  # of the time
_EVALUATION_SECONDS = 10.0  # between evaluations at least: each also saves and samples
_EVALUATION_EPOCHS = 3.0  # and at most, since that is how fast a small text is learnt by heart
_RATE_TIMES_WIDTH = 0.5  # AdamW's: what a vector's entries may move by shrinks with their number
_FINE_TUNING = 0.3  # of the rates for a new model


class Regularization(NamedTuple):
    """What keeps a model from learning a text by heart, up to a number of readings of each token
    by all the weights that there are for it."""

    up_to: float
    dropout: float
    token_split: float
    split_in_decay: bool
    weight_decay: float


_REGULARISATION = [
    Regularization(15, 0.0, 0.0, False, 0.1),
    Regularization(40, 0.1, 0.1, False, 0.1),
    Regularization(80, 0.1, 0.2, False, 0.1),
    Regularization(300, 0.1, 0.3, False, 0.1),
    Regularization(math.inf, 0.1, 0.3, True, 0.1),
]
_REGULARISATION_WHOLE = [  # for tokens that stay whole, such as characters
    Regularization(50, 0.0, 0.0, False, 0.1),
    Regularization(300, 0.1, 0.0, False, 0.1),
    Regularization(math.inf, 0.2, 0.0, False, 0.5),
]


@dataclass(frozen=True)
class Plan:
    """The model and the run, what chose them, and what else the user should know."""

    size: str
    model: ModelConfig
    train: TrainConfig
    context_length: int  # tokens a window holds: the model's, or fewer
    closing_seconds: float = 0.0  # for the last evaluation, the samples and the saving
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose_tokenizer(n_bytes: int, alphabet: int) -> tuple[str, int | None, str]:
    """`char` or `bpe`, its vocabulary, and the reason, from a corpus's bytes and characters."""
    if n_bytes < _BPE_FROM_BYTES:
        return "char", None, f"under {_BPE_FROM_BYTES // 1000} KB words repeat too seldom"
    doublings = -1 if n_bytes < _SMALL_BYTES else max(0, round(math.log2(n_bytes / 1e6) / 1.5))
    letters = 1 << max(0, alphabet - 1).bit_length()  # a large alphabet needs room for itself
    vocab_size = max(1024 * 2 ** min(doublings, 4), min(2 * letters, 1 << 14))
    size = f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} KB"
    why = f"{size} of text, {alphabet:,} different characters"
    return "bpe", round(vocab_size), why


def readable_bytes(
    size: str | None, train: TrainConfig, speed: float, start_from: ModelConfig | None
) -> int:
    """As much text as a run can read once, and some more; what is beyond need not be tokenised."""
    shape = SIZES["tiny" if size is None else size]
    model = start_from or ModelConfig.of("qwen3", **shape, vocab_size=1024)
    tokens = 60 * train.minutes * tokens_per_second(speed, matmul_params(model))
    if train.steps is not None:
        tokens = train.steps * train.batch_size * model.context_length
        return max(_READ_AT_LEAST, round(tokens * _BYTES_PER_TOKEN))
    tokenised = _TOKENISED_A_SECOND * train.minutes * 60 / 10  # in a tenth of the time
    return max(_READ_AT_LEAST, round(min(tokens * _BYTES_PER_TOKEN, tokenised)))


def make_plan(
    *,
    family: str,
    size: str | None,
    train: TrainConfig,
    overrides: Mapping[str, str],
    facts: PlanInputs,
    start_from: ModelConfig | None = None,
) -> Plan:
    """The whole plan; `overrides` are the user's field=value pairs, `start_from` the model that a
    run fine-tunes. What `train` has beside its defaults stays.

    Raises UsageError for a field that does not exist or a value that does not fit, CorpusError if
    there are too few tokens to predict even one or to fill the context asked for.
    """
    if facts.train_tokens < 2:
        raise CorpusError(
            f"the corpus has {facts.train_tokens} tokens to train on", "two are needed at least"
        )
    model_fields, train_fields = parse_overrides(overrides)
    fine_tuning = start_from is not None
    if start_from is not None:
        shape = given_shape(start_from, fields=model_fields, facts=facts)
    else:
        shape = choose_shape(family, size, train=train, fields=model_fields, facts=facts)
    if train.batch_size != TrainConfig().batch_size:
        train_fields = {"batch_size": train.batch_size} | train_fields
    pace = choose_budget(shape, train, train_fields, facts)
    chosen = _choose(shape, train, train_fields, pace, facts, fine_tuning=fine_tuning)
    config = _with_chosen(train, chosen, train_fields)
    _check(config, shape, pace, facts)
    evaluated = min(facts.held_out_tokens, config.eval_tokens)
    return Plan(
        shape.size,
        shape.model,
        config,
        shape.context_length,
        _closing_seconds(evaluated, pace),
        choices=explain(shape, config, pace, facts, overrides=overrides, fine_tuning=fine_tuning),
        notes=_notes(facts, evaluated),
    )


def _choose(
    shape: Shape,
    train: TrainConfig,
    given: Mapping[str, Any],
    pace: Budget,
    facts: PlanInputs,
    *,
    fine_tuning: bool,
) -> dict[str, Any]:
    """The fields of a TrainConfig that follow from the text, the time and the machine."""
    whole = not facts.splittable or fine_tuning or given.get("token_split") == 0
    gentle = _FINE_TUNING if fine_tuning else 1.0
    against = _regularisation(pace, whole=whole)
    eval_tokens = _eval_tokens(train, pace)
    evaluated = min(facts.held_out_tokens, given.get("eval_tokens", eval_tokens))
    return {
        "batch_size": pace.step_tokens // shape.context_length,
        "learning_rate": _RATE_TIMES_WIDTH / max(64, shape.model.d_model) * gentle,
        "matrix_learning_rate": train.matrix_learning_rate * gentle,
        "warmup_steps": min(train.warmup_steps, pace.steps // 10),
        "dropout": against.dropout,
        "token_split": against.token_split,
        "split_in_decay": against.split_in_decay,
        "weight_decay": against.weight_decay,
        "eval_every": _eval_every(evaluated, pace, facts),
        "eval_tokens": eval_tokens,
    }


def _check(config: TrainConfig, shape: Shape, pace: Budget, facts: PlanInputs) -> None:
    """What fits each for itself but not together."""
    if config.token_split > 0 and not facts.splittable:
        raise UsageError(
            f"token_split is {config.token_split:g}", "characters cannot be taken apart"
        )
    if pace.steps <= config.warmup_steps:
        raise UsageError(
            f"warmup_steps={config.warmup_steps} is not less than the {pace.steps} steps",
            "set fewer, or leave them to the plan",
        )
    check_memory(shape.model, config, shape.context_length, facts.memory)


def _regularisation(pace: Budget, *, whole: bool) -> Regularization:
    table = _REGULARISATION_WHOLE if whole else _REGULARISATION
    return next(row for row in table if pace.epochs * pace.params_per_token <= row.up_to)


def _closing_seconds(evaluated: int, pace: Budget) -> float:
    # The held-out text once more, as much of the training text, and the samples.
    return (0.7 * evaluated + 4 * pace.step_tokens) / pace.tokens_per_second + _SAMPLING_SECONDS


def _with_chosen(
    train: TrainConfig, chosen: Mapping[str, Any], given: Mapping[str, Any]
) -> TrainConfig:
    """`train` with what the plan chose, but for what the caller did."""
    default = TrainConfig()
    free = {
        name: value
        for name, value in chosen.items()
        if getattr(train, name) == getattr(default, name)
    }
    return replace(train, **(free | dict(given)))


def _eval_tokens(train: TrainConfig, pace: Budget) -> int:
    if train.steps is not None:
        return train.eval_tokens
    # A token costs about a third of a step's work. One evaluation is to fit into its share.
    in_time = pace.steps * pace.step_tokens * _EVALUATION_SHARE * 3
    return max(1, min(train.eval_tokens, round(in_time)))


def _eval_every(evaluated: int, pace: Budget, facts: PlanInputs) -> int:
    by_time = evaluated / 3 / _EVALUATION_SHARE
    by_time = max(by_time, _EVALUATION_SECONDS * pace.tokens_per_second)
    return max(20, round(min(by_time, _EVALUATION_EPOCHS * facts.train_tokens) / pace.step_tokens))


def _notes(facts: PlanInputs, evaluated: int) -> list[str]:
    if evaluated == facts.held_out_tokens:
        return []
    return [f"validation looks at about {evaluated:,} held-out tokens, evenly spread"]
