"""What to train for a corpus and the minutes given: a pure function."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tgen.config import SIZES, ModelConfig, TrainConfig
from tgen.errors import CorpusError, UsageError

# A model is trained to about its best in this many minutes on two processor cores.
_MINUTES = {"tiny": 15.0, "small": 120.0, "medium": 1200.0}
_GPU_SPEEDUP = 60.0
MAX_EVAL_TOKENS = 1 << 18  # of a larger held-out text, this many evenly spread tokens are scored
_BPE_FROM_BYTES = 100_000  # a smaller text repeats too few words to learn them as tokens


@dataclass(frozen=True)
class Plan:
    """The model and the run, and what the user should know about how they came about."""

    size: str
    model: ModelConfig
    train: TrainConfig
    notes: list[str] = field(default_factory=list)


def choose_tokenizer(n_bytes: int) -> str:
    """`char` or `bpe` for a corpus of this many bytes."""
    return "bpe" if n_bytes >= _BPE_FROM_BYTES else "char"


def choose_size(minutes: float, *, on_gpu: bool) -> str:
    """The largest size that these minutes can train well."""
    budget = minutes * (_GPU_SPEEDUP if on_gpu else 1.0)
    return next((size for size, enough in _MINUTES.items() if budget <= enough), "large")


def make_plan(
    *,
    family: str,
    size: str | None,
    train: TrainConfig,
    overrides: Mapping[str, str],
    vocab_size: int,
    train_tokens: int,
    held_out_tokens: int,
    on_gpu: bool,
) -> Plan:
    """Sizes, context and evaluation interval; `overrides` are the user's field=value pairs.

    Raises UsageError for a field that does not exist or a value that does not fit, CorpusError if
    there are too few tokens to predict even one.
    """
    if train_tokens < 2:
        raise CorpusError(
            f"the corpus has {train_tokens} tokens to train on", "two are needed at least"
        )
    if size is None:
        size = choose_size(train.minutes, on_gpu=on_gpu)
    if size not in SIZES:
        raise UsageError(f"size {size!r} is unknown", f"choose one of {', '.join(SIZES)}")
    model_fields, train_fields = parse_overrides(overrides)
    notes = []
    wanted = SIZES[size] | model_fields
    longest = train_tokens - 1
    if wanted["context_length"] > longest:
        notes.append(
            f"context_length is {longest}, not {wanted['context_length']}: "
            f"the corpus has only {train_tokens} tokens to train on"
        )
        wanted["context_length"] = max(1, longest)
    model = ModelConfig.of(family, **wanted, vocab_size=vocab_size)
    per_step = train_fields.get("batch_size", train.batch_size) * model.context_length
    evaluated = min(held_out_tokens, MAX_EVAL_TOKENS)
    if evaluated < held_out_tokens:
        notes.append(f"validation looks at about {evaluated:,} held-out tokens, evenly spread")
    config = replace(train, **train_fields)
    if config.eval_every is None:
        # A token costs about a third of a step's work: spend a twentieth of the time on them.
        config = replace(config, eval_every=max(100, round(evaluated / 3 / 0.05 / per_step)))
    return Plan(size, model, config, notes)


def parse_overrides(overrides: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits field=value pairs into the model's and the run's, values turned into their types."""
    kinds = {f.name: f.type for f in fields(ModelConfig) if f.name not in _NOT_SET}
    train_kinds = {f.name: f.type for f in fields(TrainConfig) if f.name not in _NOT_SET}
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}
    for name, text in overrides.items():
        if name in kinds:
            model[name] = _value(name, text, kinds[name])
        elif name in train_kinds:
            train[name] = _value(name, text, train_kinds[name])
        else:
            raise UsageError(
                f"--set {name}: there is no such field",
                f"the fields are {', '.join(sorted(kinds | train_kinds))}",
            )
    return model, train


# These have options of their own, or come by reading.
_NOT_SET = {"family", "vocab_size", "rope_scaling", "minutes", "steps", "val_fraction", "seed"}


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind in (int, int | None):
            return int(text)
        if kind is float:
            return float(text)
        if text in kind.__args__:  # a Literal
            return text
        raise ValueError
    except (ValueError, KeyError):
        plain = {bool: "true or false", int: "a whole number", float: "a number"}
        wanted = plain.get(kind) or (
            "a whole number" if kind == int | None else " or ".join(kind.__args__)
        )
        raise UsageError(
            f"--set {name}={text}: the value does not fit", f"{name} takes {wanted}"
        ) from None
