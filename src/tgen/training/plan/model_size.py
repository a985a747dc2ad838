"""Which shape of model for a text, the minutes and the machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tgen.config import SIZES, ModelConfig, TrainConfig
from tgen.errors import CorpusError, UsageError

_TOKENS_PER_WEIGHT = 2.5  # a run that sees fewer does better with a smaller model,
_READINGS = 12  # but for one that would read the text more often than this:
_TOKENS_PER_WEIGHT_READ = 1.0  # a larger one learns more from each reading
_WEIGHTS_PER_TOKEN = 20  # a larger model learns a small text by heart sooner, and no better
_SIZE_WITH_STEPS = "tiny"
_LONG_WINDOW = 1024  # tokens: to fine-tune with longer ones is for those who ask for it
_OVERHEAD = 0.75  # of the measured speed that a run keeps: optimizer, evaluations, samples


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What the plan follows from."""

    vocab_size: int
    train_tokens: int
    held_out_tokens: int
    splittable: bool  # tokens can be taken apart, see `corpus.token_split`
    speed: float  # useful floating-point operations a second, see `measure_speed`
    memory: int | None = None  # bytes
    n_ranks: int = 1  # that share a batch


class Shape(NamedTuple):
    """A model, the windows it learns from, and why."""

    size: str
    why_size: str
    model: ModelConfig
    context_length: int  # tokens a window holds: the model's, or fewer
    why_context: str


def choose_shape(
    family: str,
    size: str | None,
    *,
    train: TrainConfig,
    fields: Mapping[str, Any],
    facts: PlanInputs,
) -> Shape:
    """A new model's: `size` where it is given, with the user's own `fields`."""
    size, why_size = (size, "asked for") if size else _choose_size(train, facts, family)
    if size not in SIZES:
        raise UsageError(f"size {size!r} is unknown", f"choose one of {', '.join(SIZES)}")
    context, why_context = _context(SIZES[size], fields, facts)
    shape = {**SIZES[size], **fields, "context_length": context}
    model = ModelConfig.of(family, **shape, vocab_size=facts.vocab_size)
    return Shape(size, why_size, model, context, why_context)


def given_shape(model: ModelConfig, *, fields: Mapping[str, Any], facts: PlanInputs) -> Shape:
    """That of a model to fine-tune, in windows of its own context or fewer."""
    context, why_context = _shorter_context(fields, model, facts)
    return Shape("given", "that of the model it starts from", model, context, why_context)


def _choose_size(train: TrainConfig, facts: PlanInputs, family: str) -> tuple[str, str]:
    """The largest size that the time can fill and the text can, and the reason."""
    chosen, why = next(iter(SIZES)), "the smallest: there is little time or little text"
    epochs = 0.0
    for size, shape in SIZES.items():
        weights = matmul_params(ModelConfig.of(family, **shape, vocab_size=facts.vocab_size))
        if weights > _WEIGHTS_PER_TOKEN * facts.train_tokens:
            break
        tokens = 60 * train.minutes * tokens_per_second(facts.speed, weights)
        fill = _TOKENS_PER_WEIGHT_READ if epochs > _READINGS else _TOKENS_PER_WEIGHT
        if train.steps is None and tokens < fill * weights:
            break
        epochs = tokens / facts.train_tokens
        chosen, why = size, f"the largest that time and text can fill: {tokens / 1e6:.1f} M tokens"
        if train.steps is not None:
            why = "enough for a few steps; with --minutes the plan chooses"
            if size == _SIZE_WITH_STEPS:
                break
    return chosen, why


def _context(
    shape: Mapping[str, int], model_fields: Mapping[str, Any], facts: PlanInputs
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
    model_fields: Mapping[str, Any], start_from: ModelConfig, facts: PlanInputs
) -> tuple[int, str]:
    """The windows that a model is fine-tuned with, at most its own, and the reason."""
    wanted = model_fields.get("context_length", min(start_from.context_length, _LONG_WINDOW))
    for name, value in model_fields.items():
        if name != "context_length" or value > start_from.context_length:
            raise UsageError(
                f"--set {name}={value} does not go with --from", "the model's shape is its own"
            )
    return min(wanted, facts.train_tokens - 1), "no more than the model it starts from is made for"


def matmul_params(model: ModelConfig) -> int:
    """Weights that a token passes: those of the blocks and the head."""
    width = model.n_heads * model.head_dim
    attention = model.d_model * (2 * width + 2 * model.n_kv_heads * model.head_dim)
    matrices = 3 if model.activation == "swiglu" else 2
    block = attention + matrices * model.d_model * model.d_ff
    return model.n_layers * block + model.vocab_size * model.d_model


def flops_per_token(model: ModelConfig) -> int:
    """Floating-point operations that learning one token needs, forward and backward."""
    attention = 12 * model.n_layers * model.n_heads * model.head_dim * model.context_length // 2
    return 6 * matmul_params(model) + attention


def tokens_per_second(speed: float, weights: int) -> float:
    """Of a run on a machine that does `speed` floating-point operations a second: six for each
    weight of a token (Kaplan et al. 2020), and some time for all else."""
    return _OVERHEAD * speed / (6 * weights)
