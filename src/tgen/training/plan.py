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
from tgen.training.overrides import parse_overrides
from tgen.training.shape import (
    Facts,
    Shape,
    choose_shape,
    given_shape,
    n_weights,
    tokens_per_second,
)

CALIBRATION_SHARE = 0.01  # of the minutes
_BPE_FROM_BYTES = 10_000  # a smaller text repeats too few words to learn them as tokens
_SMALL_BYTES = 200_000  # and one smaller than this has too few for more than 512 tokens
_STEP_TOKENS = 2048
_BYTES_PER_TOKEN = 6
_READ_AT_LEAST = 1 << 20  # bytes
_TOKENISED_A_SECOND = 2e6  # bytes
_EVALUATION_SHARE = 0.05  # of the time
_EVALUATION_SECONDS = 10.0  # between evaluations at least: each also saves and samples
_EVALUATION_EPOCHS = 3.0  # and at most, since that is how fast a small text is learnt by heart
_RATE_TIMES_WIDTH = 0.5  # AdamW's: what a vector's entries may move by shrinks with their number
_FINE_TUNING = 0.3  # of the rates for a new model


class Regularisation(NamedTuple):
    """What keeps a model from learning a text by heart, up to a number of readings of each token
    by all the weights that there are for it."""

    up_to: float
    dropout: float
    token_split: float
    weight_decay: float


_REGULARISATION = [
    Regularisation(15, 0.0, 0.0, 0.1),
    Regularisation(40, 0.1, 0.1, 0.1),
    Regularisation(80, 0.1, 0.2, 0.1),
    Regularisation(math.inf, 0.1, 0.3, 0.1),
]
_REGULARISATION_WHOLE = [  # for tokens that stay whole, such as characters
    Regularisation(50, 0.0, 0.0, 0.1),
    Regularisation(300, 0.1, 0.0, 0.1),
    Regularisation(math.inf, 0.2, 0.0, 0.5),
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
    tokens = 60 * train.minutes * tokens_per_second(speed, n_weights(model))
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
    facts: Facts,
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
    if start_from is not None:
        shape = given_shape(start_from, fields=model_fields, facts=facts)
    else:
        shape = choose_shape(family, size, train=train, fields=model_fields, facts=facts)
    if train.batch_size != TrainConfig().batch_size:
        train_fields = {"batch_size": train.batch_size} | train_fields
    pace = _pace(shape, train, train_fields, facts)
    whole = not facts.splittable or start_from is not None or train_fields.get("token_split") == 0
    gentle = _FINE_TUNING if start_from is not None else 1.0
    against = _regularisation(pace, whole=whole)
    if train_fields.get("token_split") and not facts.splittable:
        raise UsageError(
            f"token_split is {train_fields['token_split']:g}", "characters cannot be taken apart"
        )
    eval_tokens = _eval_tokens(train, pace)
    evaluated = min(facts.held_out_tokens, train_fields.get("eval_tokens", eval_tokens))
    chosen = {
        "batch_size": pace.step_tokens // shape.context_length,
        "learning_rate": _RATE_TIMES_WIDTH / max(64, shape.model.d_model) * gentle,
        "matrix_learning_rate": train.matrix_learning_rate * gentle,
        "warmup_steps": min(train.warmup_steps, pace.steps // 10),
        "dropout": against.dropout,
        "token_split": against.token_split,
        "weight_decay": against.weight_decay,
        "eval_every": _eval_every(evaluated, pace, facts),
        "eval_tokens": eval_tokens,
    }
    config = _with_chosen(train, chosen, train_fields)
    choices = [
        Choice("size", shape.size, shape.why_size),
        Choice("context", f"{shape.context_length} tokens", shape.why_context),
        Choice("batch", f"{config.batch_size} windows", f"{pace.step_tokens:,} tokens a step"),
        Choice("rates", _rates(config), _why_rates(config, start_from is not None)),
        Choice("dropout", f"{config.dropout:g}", _why_dropout(pace)),
        Choice("token split", f"{config.token_split:.0%}", _why_split(config, whole=whole)),
        Choice("steps", _count(pace.steps, exact=train.steps is not None), _speed(facts)),
        Choice("evaluation", f"every {config.eval_every} steps", "a twentieth of the time or less"),
    ]
    return Plan(
        shape.size,
        shape.model,
        config,
        shape.context_length,
        _closing_seconds(evaluated, pace),
        choices=[_as_set(choice, overrides) for choice in choices],
        notes=_notes(facts, evaluated),
    )


class _Pace(NamedTuple):
    """How fast a run goes and how far."""

    tokens_per_second: float
    step_tokens: int
    steps: int
    readings: float  # of the text
    weights_per_token: float  # of the text


def _pace(shape: Shape, train: TrainConfig, train_fields: Mapping[str, Any], facts: Facts) -> _Pace:
    weights = n_weights(shape.model)
    speed = tokens_per_second(facts.speed, weights)
    batch_size = train_fields.get("batch_size", _batch_size(shape.context_length, facts))
    step_tokens = batch_size * shape.context_length
    steps = train.steps or max(1, round(speed * train.minutes * 60 / step_tokens))
    readings = steps * step_tokens / facts.train_tokens
    return _Pace(speed, step_tokens, steps, readings, weights / facts.train_tokens)


def _regularisation(pace: _Pace, *, whole: bool) -> Regularisation:
    table = _REGULARISATION_WHOLE if whole else _REGULARISATION
    return next(row for row in table if pace.readings * pace.weights_per_token <= row.up_to)


def _closing_seconds(evaluated: int, pace: _Pace) -> float:
    # The held-out text once more, as much of the training text, and the samples.
    return (0.7 * evaluated + 4 * pace.step_tokens) / pace.tokens_per_second


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


def _eval_tokens(train: TrainConfig, pace: _Pace) -> int:
    if train.steps is not None:
        return train.eval_tokens
    # A token costs about a third of a step's work. One evaluation is to fit into its share.
    in_time = pace.steps * pace.step_tokens * _EVALUATION_SHARE * 3
    return max(1, min(train.eval_tokens, round(in_time)))


def _eval_every(evaluated: int, pace: _Pace, facts: Facts) -> int:
    by_time = evaluated / 3 / _EVALUATION_SHARE
    by_time = max(by_time, _EVALUATION_SECONDS * pace.tokens_per_second)
    return max(20, round(min(by_time, _EVALUATION_EPOCHS * facts.train_tokens) / pace.step_tokens))


def _batch_size(context: int, facts: Facts) -> int:
    room = facts.train_tokens // (8 * context)  # a step sees an eighth of the text at most
    return max(1, min(_STEP_TOKENS // context, room))


def _rates(config: TrainConfig) -> str:
    if config.optimizer == "adamw":
        return f"AdamW {config.learning_rate:g}"
    return f"Muon {config.matrix_learning_rate:g}, AdamW {config.learning_rate:g}"


def _why_rates(config: TrainConfig, fine_tuning: bool) -> str:
    gentle = "gentler, to keep what the model knows; " if fine_tuning else ""
    return (
        f"{gentle}up over {config.warmup_steps} steps, down over the last "
        f"{config.decay_fraction:.0%}"
    )


def _why_dropout(pace: _Pace) -> str:
    weights, readings = pace.weights_per_token, pace.readings
    return f"{weights:.2g} weights for each token will read it {readings:,.3g} times"


def _why_split(config: TrainConfig, *, whole: bool) -> str:
    if config.token_split > 0:
        return "of the tokens are taken apart at random, so that each reading differs"
    return "tokens stay whole" if whole else "the text is not read often"


def _count(steps: int, *, exact: bool) -> str:
    if exact:
        return f"{steps:,}"
    digits = max(0, len(str(steps)) - 2)
    return f"about {round(steps, -digits):,}"


def _speed(facts: Facts) -> str:
    return f"this machine trains at {facts.speed / 1e9:,.0f} GFLOP/s"


def _as_set(choice: Choice, overrides: Mapping[str, str]) -> Choice:
    """A choice that the user made has no other reason."""
    fields = _FIELDS.get(choice.name, ())
    return replace(choice, why="as set") if fields and set(fields) <= set(overrides) else choice


_FIELDS = {
    "batch": ("batch_size",),
    "rates": ("learning_rate", "matrix_learning_rate"),
    "dropout": ("dropout",),
    "token split": ("token_split",),
    "evaluation": ("eval_every",),
}


def _notes(facts: Facts, evaluated: int) -> list[str]:
    if evaluated == facts.held_out_tokens:
        return []
    return [f"validation looks at about {evaluated:,} held-out tokens, evenly spread"]
