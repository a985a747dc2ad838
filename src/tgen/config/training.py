"""How a model is trained; what is None the plan chooses."""

import math
from dataclasses import dataclass
from typing import Literal

from tgen.config.check import require

LossOn = Literal["completion", "all"]
Parallel = Literal["ddp", "fsdp"]  # copies of a model on every rank, or shares of one


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a run learns. It lasts `steps` updates where given, else `minutes`."""

    minutes: float = 10.0
    steps: int | None = None
    batch_size: int = 16  # windows of context_length tokens
    accumulation: int = 1  # parts that a batch is computed in, one after another
    optimizer: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 2e-3  # AdamW's; all parameters' if it is the only optimizer
    matrix_learning_rate: float = 0.03  # Muon's
    momentum: float = 0.95  # Muon's
    warmup_steps: int = 50
    decay_fraction: float = 0.3  # the last part of the run, over which the rate falls to 0
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9
    beta2: float = 0.98
    grad_clip: float = 1.0
    dropout: float = 0.0
    token_split: float = 0.0  # the probability that a token is taken apart, until the rate falls
    split_in_decay: bool = False  # and while it does, as much less as the rate is
    loss_on: LossOn = "completion"  # of rows that have one; a text counts everywhere
    eval_every: int | None = None  # steps; None: as often as a twentieth of the time allows
    eval_tokens: int = 1 << 18  # of a larger held-out text, so many evenly spread ones are scored
    patience: int = 5  # evaluations without a better one before the rate falls; 0: never
    keep: int = 2  # newest states on the disk, beside the best
    compile: bool = False  # the step through torch.compile
    val_fraction: float = 0.1
    seed: int = 1337

    def __post_init__(self) -> None:
        require(0 < self.minutes < math.inf, "minutes", self.minutes, "a positive number")
        require(self.steps is None or self.steps >= 1, "steps", self.steps, "at least 1")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        parts = f"at least 1 and at most batch_size={self.batch_size}"
        require(1 <= self.accumulation <= self.batch_size, "accumulation", self.accumulation, parts)
        require(self.keep >= 2, "keep", self.keep, "at least 2: the newest may be damaged")
        require(self.patience >= 0, "patience", self.patience, "at least 0")
        every = self.eval_every
        require(every is None or every >= 1, "eval_every", every, "at least 1")
        require(self.eval_tokens >= 1, "eval_tokens", self.eval_tokens, "at least 1")
        for name in ("learning_rate", "matrix_learning_rate", "grad_clip"):
            value = getattr(self, name)
            require(0 < value < math.inf, name, value, "a positive number")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "at least 0")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "at least 0")
        for name in (
            "decay_fraction",
            "momentum",
            "beta1",
            "beta2",
            "dropout",
            "token_split",
            "val_fraction",
        ):
            value = getattr(self, name)
            require(0 <= value < 1, name, value, "a number from 0 up to, not including, 1")
        require(0 <= self.seed < 2**63, "seed", self.seed, "a number from 0 to 2^63 - 1")
