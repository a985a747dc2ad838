"""What to train for a corpus, the minutes and the machine: pure functions, each with its reasons.

The figures behind the thresholds were measured: `benchmarks/learning/`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tgen.config import SIZES, ModelConfig, TrainConfig
from tgen.errors import CorpusError, UsageError
from tgen.reports import Choice
from tgen.training.overrides import parse_overrides

MAX_EVAL_TOKENS = 1 << 18  # of a larger held-out text, this many evenly spread tokens are scored
CALIBRATION_SHARE = 0.01  # of the minutes
_BPE_FROM_BYTES = 100_000  # a smaller text repeats too few words to learn them as tokens
_TOKENS_PER_WEIGHT = 2.5  # a run that sees fewer does better with a smaller model
_WEIGHTS_PER_TOKEN = 10  # a larger model learns a small text by heart sooner, and no better
_SIZE_WITH_STEPS = "tiny"
_STEP_TOKENS = 2048
_BYTES_PER_TOKEN = 6
_READ_AT_LEAST = 1 << 20  # bytes
_TOKENISED_A_SECOND = 2e6  # bytes
_EVALUATION_SECONDS = 10.0  # between evaluations at least: each also saves and samples
_EVALUATION_EPOCHS = 3.0  # and at most, since that is how fast a small text is learnt by heart
# Up to so many readings of a token by all weights there are for it: dropout, weight decay.
_REGULARISATION = [(50.0, 0.0, 0.1), (300.0, 0.1, 0.1), (math.inf, 0.2, 0.5)]
_RATE_TIMES_WIDTH = 0.5  # AdamW's: what a vector's entries may move by shrinks with their number
_LONG_WINDOW = 1024  # tokens: to fine-tune with longer ones is for those who ask for it
_FINE_TUNING = 0.3  # of the rates for a new model
_OVERHEAD = 0.75  # of the measured speed that a run keeps: optimizer, evaluations, samples


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the plan follows from."""

    vocab_size: int
    train_tokens: int
    held_out_tokens: int
    speed: float  # useful floating-point operations a second, see `measure_speed`


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
    doublings = round(math.log2(n_bytes / 1e6) / 1.5)
    letters = 1 << max(0, alphabet - 1).bit_length()  # a large alphabet needs room for itself
    vocab_size = max(1024 * 2 ** max(-1, min(doublings, 4)), min(2 * letters, 1 << 14))
    why = f"{n_bytes / 1e6:.1f} MB of text, {alphabet:,} different characters"
    return "bpe", round(vocab_size), why


def choose_size(train: TrainConfig, facts: Facts, family: str) -> tuple[str, str]:
    """The largest size that the time can fill and the text can, and the reason."""
    chosen, why = next(iter(SIZES)), "the smallest: there is little time or little text"
    for size, shape in SIZES.items():
        weights = _n_weights(ModelConfig.of(family, **shape, vocab_size=facts.vocab_size))
        if weights > _WEIGHTS_PER_TOKEN * facts.train_tokens:
            break
        tokens = _tokens_in_time(train, facts.speed, weights)
        if train.steps is None and tokens < _TOKENS_PER_WEIGHT * weights:
            break
        chosen, why = size, f"the largest that time and text can fill: {tokens / 1e6:.1f} M tokens"
        if train.steps is not None:
            why = "--minutes would choose"
            if size == _SIZE_WITH_STEPS:
                break
    return chosen, why


def readable_bytes(
    size: str | None, train: TrainConfig, speed: float, start_from: ModelConfig | None
) -> int:
    """As much text as a run can read once, and some more; what is beyond need not be tokenised."""
    shape = SIZES["tiny" if size is None else size]
    model = start_from or ModelConfig.of("qwen3", **shape, vocab_size=1024)
    tokens = _tokens_in_time(train, speed, _n_weights(model))
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
        size, why_size = "given", "that of the model it starts from"
        context, why_context = _shorter_context(model_fields, start_from, facts)
        model = start_from
    else:
        size, why_size = (size, "asked for") if size else choose_size(train, facts, family)
        if size not in SIZES:
            raise UsageError(f"size {size!r} is unknown", f"choose one of {', '.join(SIZES)}")
        context, why_context = _context(SIZES[size], model_fields, facts)
        shape = SIZES[size] | model_fields | {"context_length": context}
        model = ModelConfig.of(family, **shape, vocab_size=facts.vocab_size)
    weights = _n_weights(model)
    tokens_per_second = _OVERHEAD * facts.speed / (6 * weights)
    if train.batch_size != TrainConfig().batch_size:
        train_fields = {"batch_size": train.batch_size} | train_fields
    per_step = train_fields.get("batch_size", _batch_size(context, facts)) * context
    steps = train.steps or max(1, round(tokens_per_second * train.minutes * 60 / per_step))
    epochs = steps * per_step / facts.train_tokens
    evaluated = min(facts.held_out_tokens, MAX_EVAL_TOKENS)
    weights_per_token = weights / facts.train_tokens
    dropout, weight_decay = next(
        rest for limit, *rest in _REGULARISATION if epochs * weights_per_token <= limit
    )
    gentle = _FINE_TUNING if start_from is not None else 1.0
    chosen = {
        "batch_size": per_step // context,
        "learning_rate": _RATE_TIMES_WIDTH / max(64, model.d_model) * gentle,
        "matrix_learning_rate": train.matrix_learning_rate * gentle,
        "warmup_steps": min(train.warmup_steps, steps // 10),
        "dropout": dropout,
        "weight_decay": weight_decay,
        "eval_every": _eval_every(evaluated, tokens_per_second, per_step, facts),
    }
    config = _with_chosen(train, chosen, train_fields)
    choices = [
        Choice("size", size, why_size),
        Choice("context", f"{context} tokens", why_context),
        Choice("batch", f"{config.batch_size} windows", f"{per_step:,} tokens a step"),
        Choice("rates", _rates(config), _why_rates(config, start_from is not None)),
        Choice("dropout", f"{config.dropout:g}", _why_dropout(epochs, weights_per_token)),
        Choice("steps", _count(steps, exact=train.steps is not None), _speed(facts)),
        Choice("evaluation", f"every {config.eval_every} steps", "a twentieth of the time or less"),
    ]
    # The held-out text once more, as much of the training text, and the samples.
    closing_seconds = (0.7 * evaluated + 4 * per_step) / tokens_per_second
    return Plan(
        size,
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


def _context(
    shape: Mapping[str, int], model_fields: Mapping[str, Any], facts: Facts
) -> tuple[int, str]:
    """A new model's window, and the reason."""
    longest = facts.train_tokens - 1
    if "context_length" in model_fields:
        wanted: int = model_fields["context_length"]
        if wanted > longest:
            raise CorpusError(
                f"context_length={wanted} is longer than the text: "
                f"{facts.train_tokens} tokens to train on",
                f"set at most {longest}",
            )
        return wanted, "asked for"
    wanted = shape["context_length"]
    room = max(1, min(longest, facts.train_tokens // 8))
    if room < wanted:
        return room, f"an eighth of the {facts.train_tokens} tokens there are"
    return wanted, "goes with the size"


def _shorter_context(
    model_fields: Mapping[str, Any], start_from: ModelConfig, facts: Facts
) -> tuple[int, str]:
    """The windows that a model is fine-tuned with, at most its own, and the reason."""
    wanted = model_fields.get("context_length", min(start_from.context_length, _LONG_WINDOW))
    for name, value in model_fields.items():
        if name != "context_length" or value > start_from.context_length:
            raise UsageError(
                f"--set {name}={value} does not go with --from", "the model's shape is its own"
            )
    return min(wanted, facts.train_tokens - 1), "no more than the model it starts from is made for"


def _eval_every(evaluated: int, tokens_per_second: float, per_step: int, facts: Facts) -> int:
    # A token costs about a third of a step's work: spend a twentieth of the time on them.
    by_time = max(evaluated / 3 / 0.05, _EVALUATION_SECONDS * tokens_per_second)
    return max(20, round(min(by_time, _EVALUATION_EPOCHS * facts.train_tokens) / per_step))


def _batch_size(context: int, facts: Facts) -> int:
    room = facts.train_tokens // (8 * context)  # a step sees an eighth of the text at most
    return max(1, min(_STEP_TOKENS // context, room))


def _n_weights(model: ModelConfig) -> int:
    """Weights that a token passes: those of the blocks and the head."""
    width = model.n_heads * model.head_dim
    attention = model.d_model * (2 * width + 2 * model.n_kv_heads * model.head_dim)
    matrices = 3 if model.activation == "swiglu" else 2
    block = attention + matrices * model.d_model * model.d_ff
    return model.n_layers * block + model.vocab_size * model.d_model


def _tokens_in_time(train: TrainConfig, speed: float, weights: int) -> float:
    return _OVERHEAD * speed * train.minutes * 60 / (6 * weights)


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
    "evaluation": ("eval_every",),
}


def _notes(facts: Facts, evaluated: int) -> list[str]:
    if evaluated == facts.held_out_tokens:
        return []
    return [f"validation looks at about {evaluated:,} held-out tokens, evenly spread"]
