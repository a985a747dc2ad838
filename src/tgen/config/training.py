"""Hyperparameters of a training run; None means that the plan chooses the value."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal

from tgen.config.model import ModelConfig
from tgen.config.option import check_ranges, option, require, widen_floats

LossOn = Literal["completion", "all"]
Precision = Literal["float32", "bfloat16"]
Optimizer = Literal["muon", "adamw"]
MuonScale = Literal["spectral", "adamw"]  # of its updates: singular values of 1, or AdamW's RMS
LoraTargets = Literal["all", "attention", "feed_forward"]  # matrices of the blocks
# Replicate the model on every rank, shard it over all, or shard it within each machine.
Parallel = Literal["ddp", "fsdp", "hsdp"]
SHARDED: tuple[Parallel, ...] = ("fsdp", "hsdp")

# Attention on a CPU, here because the estimate of memory needs it without torch.
QUERY_CHUNK = 128  # queries of all heads, computed at once; for fewer, torch's kernel suffices
MAX_STORED_LENGTH = 1024  # tokens: the memory of attention weights grows with the square

_COUNT = "a whole number of at least 1"
_POSITIVE, _FRACTION = "a positive number", "a number from 0 up to, but not including, 1"
_ABOVE_ZERO, _BELOW_ONE = 5e-324, math.nextafter(1, 0)


def _fraction(default: float | None, help_text: str) -> Any:
    return option(default, help_text, low=0, high=_BELOW_ONE, expected=_FRACTION)


def _positive(default: float | None, help_text: str) -> Any:
    return option(default, help_text, low=_ABOVE_ZERO, expected=_POSITIVE)


def _count(default: int | None, help_text: str, flags: str = "", **cli: Any) -> Any:
    return option(default, help_text, flags, low=1, expected=_COUNT, **cli)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The user's settings for a run; the plan chooses the fields that are None.

    A run takes `steps` steps if that is set, else `minutes`.
    """

    minutes: float = option(
        10.0,
        "Time budget in minutes.",
        "--minutes",
        low=_ABOVE_ZERO,
        high=1e9,
        expected="a number above 0 and up to 1e9",
    )
    steps: int | None = _count(
        None,
        "Number of training steps, instead of --minutes.",
        "--steps",
        shown_default="as many as the minutes allow",
        excludes="minutes",
    )
    batch_size: int | None = _count(None, "Windows of context_length tokens per step.")
    accumulation: int = _count(1, "Micro-batches per step, to save memory.")
    lora: int | None = _count(
        None,
        "Train a LoRA adapter of this rank instead of all weights; needs --from.",
        "--lora",
        metavar="RANK",
        excludes="adapter resume",
        needs="start_from",
        hint="remove --lora: the adapter has a rank",
    )
    lora_alpha: float = option(
        32.0,
        "Strength of a LoRA adapter: its scale is alpha / rank.",
        low=_ABOVE_ZERO,
        high=1e9,
        expected="a number above 0 and up to 1e9",
    )
    lora_targets: LoraTargets = option("all", "Matrices of the blocks that LoRA adapts.")
    activation_checkpointing: bool | None = option(
        None, "Compute activations again in the backward pass, to save memory."
    )
    max_steps: int | None = _count(None, "End after so many steps, even before the minutes.")
    optimizer: Optimizer | None = option(
        None, "Optimizer of the matrices inside the blocks; AdamW updates the rest."
    )
    precision: Precision | None = option(
        None, "Precision of the inputs of matrix products; weights and sums are float32."
    )
    learning_rate: float | None = _positive(None, "Learning rate of AdamW.")
    embedding_learning_rate: float | None = _positive(
        None, "Learning rate of AdamW for an embedding that is not tied to the LM head."
    )
    matrix_learning_rate: float | None = _positive(None, "Learning rate of Muon.")
    momentum: float | None = _fraction(None, "Momentum of Muon.")
    muon_scale: MuonScale | None = option(
        None, "Size of Muon's updates: singular values of 1, or as large as AdamW's."
    )
    separate_qkv: bool = option(True, "Muon orthogonalizes queries, keys and values separately.")
    bigram_start: bool | None = option(
        None, "Start embedding and LM head from the text's bigrams, not from random numbers."
    )
    warmup_steps: int | None = option(None, "Steps of linear warmup.", low=0)
    decay_fraction: float = _fraction(
        0.3, "Last fraction of the run, over which the learning rate decays linearly to 0."
    )
    weight_decay: float | None = option(None, "Decoupled weight decay of matrices.", low=0)
    beta1: float | None = _fraction(None, "AdamW decay rate of the first moment.")
    beta2: float | None = _fraction(None, "AdamW decay rate of the second moment.")
    grad_clip: float = _positive(1.0, "Maximum norm of the gradient (clipping).")
    dropout: float | None = _fraction(None, "Dropout probability.")
    consistency: float | None = option(
        None,
        "Strength of R-Drop: a step computes each window twice, with two dropout masks, and "
        "penalizes the divergence of the two predictions; 0 disables it.",
        low=0,
        high=100,
        expected="a number from 0 to 100",
    )
    bpe_dropout: float | None = _fraction(
        None, "Probability of splitting a BPE token, until the learning rate decays."
    )
    bpe_dropout_in_decay: bool | None = option(
        None, "Continue BPE-dropout during the decay, in proportion to the learning rate."
    )
    temperature_scaling: bool | None = option(
        None, "Multiply the logits by a factor that lowers the validation loss."
    )
    loss_on: LossOn = option(
        "completion", "Tokens of prompt/completion rows that contribute to the loss."
    )
    eval_every: int | None = _count(None, "Steps between evaluations.")
    eval_tokens: int | None = _count(None, "Maximum number of held-out tokens per evaluation.")
    patience: int | None = option(
        None,
        "Early stopping after so many evaluations in a row, each worse than the one before and "
        "significantly worse than the best; 0 disables it.",
        low=0,
    )
    keep_checkpoints: int = option(  # at least 2: the newest may be damaged
        2, "Number of newest training states to keep on disk, besides the best one.", low=2
    )
    compile: bool = option(False, "Compile the training step with torch.compile.")
    val_fraction: float = option(
        0.1,
        "Fraction held out for validation: the end of a text, or chats chosen by their content; "
        "0 disables it.",
        "--val-fraction",
        panel="Data and tokenizer",
        low=0,
        high=_BELOW_ONE,
        expected=_FRACTION,
    )
    seed: int = option(
        1337,
        "Random seed; with --steps, the same seed repeats the run.",
        "--seed",
        low=0,
        high=2**63 - 1,
        expected="a number from 0 to 2^63 - 1",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        widen_floats(self)
        if self.batch_size is not None:
            at_most = f"at most batch_size={self.batch_size}"
            require(
                self.accumulation <= self.batch_size, "accumulation", self.accumulation, at_most
            )

    @property
    def changed(self) -> list[str]:
        """The fields that do not have their defaults."""
        return [one.name for one in fields(self) if getattr(self, one.name) != one.default]

    @property
    def explicit(self) -> dict[str, Any]:
        """The fields that the plan does not choose."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ResolvedTrainConfig(TrainConfig):
    """A TrainConfig without None, as training needs it; the defaults apply where no plan chose."""

    batch_size: int = 16
    optimizer: Optimizer = "muon"
    activation_checkpointing: bool = False
    muon_scale: MuonScale = "spectral"
    patience: int = 5
    precision: Precision = "float32"
    learning_rate: float = 2e-3
    embedding_learning_rate: float = 2e-3
    matrix_learning_rate: float = 0.03
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.98
    bigram_start: bool = False
    warmup_steps: int = 50
    weight_decay: float = 0.1
    dropout: float = 0.0
    consistency: float = 0.0
    bpe_dropout: float = 0.0
    bpe_dropout_in_decay: bool = False
    temperature_scaling: bool = False
    eval_every: int = 100
    eval_tokens: int = 1 << 18

    @property
    def passes(self) -> int:
        """How often a step computes each window."""
        return 2 if self.dropout > 0 and self.consistency > 0 else 1

    @property
    def rates(self) -> str:
        """The learning rates as settings, for a hint."""
        names = ("learning_rate", "embedding_learning_rate", "matrix_learning_rate")
        first, second, third = (f"{name}={getattr(self, name):g}" for name in names)
        return f"{first}, {second} and {third}"

    def __post_init__(self) -> None:
        TrainConfig(**vars(self))  # checks the ranges, which the fields above do not declare again
        widen_floats(self)
        for one in fields(self):
            is_set = getattr(self, one.name) is not None or one.default is None
            require(is_set, one.name, None, "a value: only a plan can choose one")


def settings_without_effect(
    given: Collection[str], config: ResolvedTrainConfig, model: ModelConfig, *, has_val: bool
) -> dict[str, str]:
    """Return what each of the `given` settings would need, for those that change nothing."""
    is_lora, not_muon = config.lora is not None, config.optimizer != "muon"
    one_embedding = model.tied_embeddings or is_lora
    unused = dict.fromkeys(("lora_alpha", "lora_targets"), "--lora") if not is_lora else {}
    if not_muon:
        names = "momentum", "matrix_learning_rate", "muon_scale", "separate_qkv"
        unused |= dict.fromkeys(names, "optimizer=muon")
    if one_embedding:
        unused["embedding_learning_rate"] = "an embedding of its own that is trained"
    if is_lora:
        unused["separate_qkv"] = "training all weights"
    if not config.dropout and config.consistency:
        unused["consistency"] = "dropout"
    if not config.bpe_dropout and config.bpe_dropout_in_decay:
        unused["bpe_dropout_in_decay"] = "bpe_dropout"
    if not has_val:
        unused |= dict.fromkeys(("patience", "eval_tokens"), "a validation set")
    return {name: needed for name, needed in unused.items() if name in given}
