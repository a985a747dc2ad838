"""What to train for a corpus, the minutes and the machine: pure functions, each with its reasons.

The figures behind the thresholds were measured: `benchmarks/learning/`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tgen.config import SIZES, ModelConfig, TrainConfig
from tgen.errors import CorpusError
from tgen.reports import Choice
from tgen.training.overrides import parse_overrides
from tgen.training.shape import Facts, choose_shape, given_shape, n_weights, tokens_per_second

MAX_EVAL_TOKENS = 1 << 18  # of a larger held-out text, this many evenly spread tokens are scored
CALIBRATION_SHARE = 0.01  # of the minutes
_BPE_FROM_BYTES = 10_000  # a smaller text repeats too few words to learn them as tokens
_SMALL_BYTES = 200_000  # and one smaller than this has too few for more than 512 tokens
_STEP_TOKENS = 2048
_BYTES_PER_TOKEN = 6
_READ_AT_LEAST = 1 << 20  # bytes
_TOKENISED_A_SECOND = 2e6  # bytes
_EVALUATION_SECONDS = 10.0  # between evaluations at least: each also saves and samples
_EVALUATION_EPOCHS = 3.0  # and at most, since that is how fast a small text is learnt by heart
_WHY_SPLIT = {
    True: "taken apart at random, so that each reading differs",
    False: "these tokens stay whole",
}
# Up to so many readings of a token by all weights there are for it: dropout, share of tokens
# taken apart, weight decay. The second table is for tokens that stay whole, such as characters.
_REGULARISATION = [
    (15.0, 0.0, 0.0, 0.1),
    (40.0, 0.1, 0.1, 0.1),
    (80.0, 0.1, 0.2, 0.1),
    (math.inf, 0.1, 0.3, 0.1),
]
_REGULARISATION_WHOLE = [(50.0, 0.0, 0.0, 0.1), (300.0, 0.1, 0.0, 0.1), (math.inf, 0.2, 0.0, 0.5)]
_RATE_TIMES_WIDTH = 0.5  # AdamW's: what a vector's entries may move by shrinks with their number
_FINE_TUNING = 0.3  # of the rates for a new model


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
    why = f"{n_bytes / 1e6:.1f} MB of text, {alphabet:,} different characters"
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
        shape = given_shape(start_from, model_fields, facts)
    else:
        shape = choose_shape(family, size, train, model_fields, facts)
    model, context = shape.model, shape.context_length
    weights = n_weights(model)
    speed = tokens_per_second(facts.speed, weights)
    if train.batch_size != TrainConfig().batch_size:
        train_fields = {"batch_size": train.batch_size} | train_fields
    per_step = train_fields.get("batch_size", _batch_size(context, facts)) * context
    steps = train.steps or max(1, round(speed * train.minutes * 60 / per_step))
    epochs = steps * per_step / facts.train_tokens
    evaluated = min(facts.held_out_tokens, MAX_EVAL_TOKENS)
    weights_per_token = weights / facts.train_tokens
    table = _REGULARISATION if facts.splittable else _REGULARISATION_WHOLE
    dropout, token_split, weight_decay = next(
        rest for limit, *rest in table if epochs * weights_per_token <= limit
    )
    gentle = _FINE_TUNING if start_from is not None else 1.0
    chosen = {
        "batch_size": per_step // context,
        "learning_rate": _RATE_TIMES_WIDTH / max(64, model.d_model) * gentle,
        "matrix_learning_rate": train.matrix_learning_rate * gentle,
        "warmup_steps": min(train.warmup_steps, steps // 10),
        "dropout": dropout,
        "token_split": token_split,
        "weight_decay": weight_decay,
        "eval_every": _eval_every(evaluated, speed, per_step, facts),
    }
    config = _with_chosen(train, chosen, train_fields)
    choices = [
        Choice("size", shape.size, shape.why_size),
        Choice("context", f"{context} tokens", shape.why_context),
        Choice("batch", f"{config.batch_size} windows", f"{per_step:,} tokens a step"),
        Choice("rates", _rates(config), _why_rates(config, start_from is not None)),
        Choice("dropout", f"{config.dropout:g}", _why_dropout(epochs, weights_per_token)),
        Choice("token split", f"{config.token_split:.0%}", _WHY_SPLIT[facts.splittable]),
        Choice("steps", _count(steps, exact=train.steps is not None), _speed(facts)),
        Choice("evaluation", f"every {config.eval_every} steps", "a twentieth of the time or less"),
    ]
    # The held-out text once more, as much of the training text, and the samples.
    closing_seconds = (0.7 * evaluated + 4 * per_step) / speed
    return Plan(
        shape.size,
        model,
        config,
        context,
        closing_seconds,
        choices=[_as_set(choice, overrides) for choice in choices],
        notes=_notes(facts, evaluated),
    )


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


def _eval_every(evaluated: int, speed: float, per_step: int, facts: Facts) -> int:
    # A token costs about a third of a step's work: spend a twentieth of the time on them.
    by_time = max(evaluated / 3 / 0.05, _EVALUATION_SECONDS * speed)
    return max(20, round(min(by_time, _EVALUATION_EPOCHS * facts.train_tokens) / per_step))


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


def _why_dropout(epochs: float, weights_per_token: float) -> str:
    return f"{weights_per_token:.2g} weights for each token will read it {epochs:,.3g} times"


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
