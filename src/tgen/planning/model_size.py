"""Choice of the model for a corpus, a time budget and a machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tgen.config import SIZES, ModelConfig
from tgen.config.training import Precision, TrainConfig
from tgen.errors import CorpusError, UsageError
from tgen.planning.costs import FrozenModel, MeasuredStep, matmul_params, n_parameters
from tgen.planning.fine_tuning import MAX_MEMORIZED_ROWS, WINDOW
from tgen.planning.memory import fitting_context
from tgen.planning.shape_search import find_shape, nearest_size

EXPLICIT = "set by the user"  # the reason for values that the user chose
_TOKENS_PER_PARAM = 2.5  # a run with fewer training tokens does better with a smaller model,
_MANY_EPOCHS = 12  # unless that one trained for more epochs than this:
_TOKENS_PER_PARAM_MANY_EPOCHS = 1.0  # a larger model learns more from each epoch
_PARAMS_PER_TOKEN = 20  # corpus tokens: larger models memorize it sooner and are no better
_SIZE_WITH_STEPS = "tiny"
_UNTIED = {"llama", "qwen2", "qwen3"}  # families that learn faster with an untied LM head
_EFFICIENCY = 0.75  # fraction of the measured speed: the rest is optimizer, evaluations, samples


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Inputs of the plan besides the user's settings."""

    vocab_size: int
    train_tokens: int
    val_tokens: int
    has_merges: bool  # the tokenizer has BPE merges, so that BPE-dropout is possible
    flops_per_second: float  # over all ranks, see `measure_speed`
    bfloat16_flops_per_second: float | None = None  # with products in bfloat16; None: unsupported
    setup_seconds: float = 0.0  # of the time budget, before the first step
    measured_step: MeasuredStep | None = None  # of the chosen model; None: to be estimated
    memory: int | None = None  # bytes of this machine; None: unknown, or not to be checked
    rank_memory: int | None = None  # bytes that each rank may use; None: unknown
    n_ranks: int = 1  # ranks that share a batch
    on_cpu: bool = False
    train_rows: int | None = None  # examples with targets, such as chats; None: plain text
    longest_row: int = 0  # tokens of the longest prompt with its answer; 0: there are none
    longest_text: int = 0  # tokens of the longest row, if all rows are texts
    n_answers: int = 0  # to learn, where nothing is held out and all of the corpus is such rows
    general_tokens: int | None = None  # of the user's general text; None: the base model writes one
    source_optimizer: str | None = None  # that trained the base model; None: unknown
    frozen: FrozenModel | None = None  # the base model of an adapter; None: all is trained

    @property
    def memorizes_rows(self) -> bool:
        """Whether the corpus is a few answers to memorize, in as many epochs as that takes."""
        return 0 < self.n_answers <= MAX_MEMORIZED_ROWS

    def speed(self, precision: Precision) -> float:
        """Return the FLOP/s of all ranks with products in this precision."""
        reduced = self.bfloat16_flops_per_second if precision == "bfloat16" else None
        return reduced or self.flops_per_second


class ModelChoice(NamedTuple):
    """A model, its training windows, and the reasons."""

    size: str
    why_size: str
    model: ModelConfig
    context_length: int  # tokens per training window: the model's context length or fewer
    why_context: str


class PlannedRun(NamedTuple):
    """A run whose model and precision are chosen: what its other hyperparameters depend on."""

    choice: ModelChoice
    train: TrainConfig  # of the user, and the optimizer
    inputs: PlanInputs  # with the speed in the chosen precision
    precision: Precision
    why_precision: str
    fine_tuning: bool

    @property
    def model(self) -> ModelConfig:
        """The chosen model."""
        return self.choice.model

    @property
    def context(self) -> int:
        """Tokens per training window."""
        return self.choice.context_length


def choose_model(
    family: str,
    size: str | None,
    *,
    parameters: int | None = None,
    train: TrainConfig,
    fields: Mapping[str, Any],
    inputs: PlanInputs,
) -> ModelChoice:
    """Choose a new model: `size` or `parameters`, and the model `fields` are the user's."""
    if parameters is not None:
        size = nearest_size(parameters, family, inputs.vocab_size)
    size, why_size = (size, EXPLICIT) if size else _choose_size(train, inputs, family)
    shape: dict[str, Any] = {"tied_embeddings": False} if family in _UNTIED else {}
    shape |= {**SIZES[size], **fields, "vocab_size": inputs.vocab_size}
    context, why_context = _choose_context(ModelConfig.of(family, **shape), fields, inputs)
    shape["context_length"] = context
    if parameters is not None:
        shape |= find_shape(family, parameters, shape)._asdict()
    model = ModelConfig.of(family, **shape)
    if parameters is not None:
        size, why_size = f"{parameters:,} parameters", f"{EXPLICIT}; {n_parameters(model):,} fit"
    return ModelChoice(size, why_size, model, context, why_context)


def keep_model(model: ModelConfig, *, fields: Mapping[str, Any], inputs: PlanInputs) -> ModelChoice:
    """Choose the windows to fine-tune `model` with: its context length or fewer tokens."""
    wanted = fields.get("context_length", min(model.context_length, WINDOW))
    why = "at most the base model's context length"
    if "context_length" not in fields and inputs.longest_row > wanted:
        wanted = min(inputs.longest_row, model.context_length)
        wanted, why = _fit_row(wanted, model, inputs)
        if wanted == model.context_length < inputs.longest_row:
            why = f"the base model's; the longest row has {inputs.longest_row:,} tokens"
    for name, value in fields.items():
        if name != "context_length" or value > model.context_length:
            hint = "remove it: fine-tuning keeps the model's architecture"
            if name == "context_length":
                hint = f"set context_length to at most {model.context_length}, that of the model"
            raise UsageError(f"--set {name}={value} cannot be combined with --from", hint)
    context = min(wanted, max(inputs.train_tokens - 1, inputs.longest_row))
    return ModelChoice("unchanged", "that of the base model", model, context, why)


def tokens_per_second(flops_per_second: float, n_params: int) -> float:
    """Estimate the training speed: 6 FLOP per parameter and token (Kaplan et al. 2020), and
    overhead."""
    return _EFFICIENCY * flops_per_second / (6 * n_params)


def _choose_size(train: TrainConfig, inputs: PlanInputs, family: str) -> tuple[str, str]:
    """Return the largest size that time and corpus support, and the reason."""
    chosen, why = next(iter(SIZES)), "the smallest: short time budget or small corpus"
    epochs = 0.0
    for size, shape in SIZES.items():
        n_params = matmul_params(ModelConfig.of(family, **shape, vocab_size=inputs.vocab_size))
        if n_params > _PARAMS_PER_TOKEN * inputs.train_tokens:
            break
        tokens = 60 * train.minutes * tokens_per_second(inputs.flops_per_second, n_params)
        per_param = _TOKENS_PER_PARAM_MANY_EPOCHS if epochs > _MANY_EPOCHS else _TOKENS_PER_PARAM
        if train.steps is None and tokens < per_param * n_params:
            break
        epochs = tokens / inputs.train_tokens
        chosen = size
        why = "the largest for this time budget and corpus"
        if train.steps is not None:
            why = "the default with --steps; with --minutes the plan chooses"
            if size == _SIZE_WITH_STEPS:
                break
    return chosen, why


def _choose_context(
    model: ModelConfig, fields: Mapping[str, Any], inputs: PlanInputs
) -> tuple[int, str]:
    """Return a new model's context length and the reason; `model` has the default of its size."""
    longest = inputs.train_tokens - 1
    if inputs.train_rows is not None:  # windows are filled up
        return fields["context_length"], "for whole rows"
    if inputs.n_answers:  # windows are filled up
        longest = max(longest, fields.get("context_length", 0))
    if "context_length" in fields:
        wanted: int = fields["context_length"]
        if wanted > longest:
            raise CorpusError(
                f"context_length={wanted} is longer than the corpus "
                f"({inputs.train_tokens:,} training tokens)",
                f"set context_length to at most {longest}",
            )
        return wanted, EXPLICIT
    wanted = model.context_length
    limit = max(1, min(longest, inputs.train_tokens // 8))
    if min(inputs.longest_text, wanted) > limit:
        return min(inputs.longest_text, wanted, longest), "the longest row"
    if inputs.longest_row > (wanted if inputs.n_answers else min(wanted, limit)):
        return _fit_row(inputs.longest_row, model, inputs)
    if limit < wanted and not inputs.n_answers:
        return limit, f"an eighth of the {inputs.train_tokens:,} training tokens"
    return wanted, "default of the size"


def _fit_row(wanted: int, model: ModelConfig, inputs: PlanInputs) -> tuple[int, str]:
    """Return a context of `wanted` tokens for the longest row, or what fits into memory."""
    memory = inputs.rank_memory if inputs.memory is None else inputs.memory
    context = fitting_context(model, wanted, memory, frozen=inputs.frozen, on_gpu=not inputs.on_cpu)
    if context < wanted:
        return context, f"more does not fit into memory; the longest row has {wanted:,} tokens"
    return context, "the longest row"
