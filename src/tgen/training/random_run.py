"""A training run on random tokens, whose steps take as long as those of `tgen train`.

They are advanced report by report through its loop, with its loss and optimizers, but without
document ends and BPE-dropout. The duration of a step does not depend on the token ids.
"""

from dataclasses import replace

import numpy as np
import torch

from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.corpus import TokenDataset
from tgen.training.loop import train
from tgen.training.state import new_state

_UNLIMITED = 1 << 40  # steps
_MIN_TOKENS = 1 << 20


class RandomRun:
    """A training run on random tokens that advances a few steps at a time."""

    def __init__(
        self, model: ModelConfig, config: ResolvedTrainConfig, device: torch.device
    ) -> None:
        self.state = new_state(model, config, device)
        unlimited = replace(config, steps=_UNLIMITED, eval_every=_UNLIMITED, bpe_dropout=0.0)
        dataset = random_dataset(model, config)
        self._reports = train(self.state.model, dataset, unlimited, self.state)

    def advance(self, n: int) -> int:
        """Take at least `n` steps, until their losses are known; return the number of steps."""
        before = self.state.progress.step
        while self.state.progress.step < before + n:
            next(self._reports)
        return self.state.progress.step - before


def random_dataset(model: ModelConfig, config: ResolvedTrainConfig) -> TokenDataset:
    """Return uniformly random tokens, in windows of the full context length."""
    dtype = np.uint16 if model.vocab_size <= 1 << 16 else np.uint32
    n = max(_MIN_TOKENS, 2 * model.context_length)
    random = np.random.default_rng(config.seed)
    return TokenDataset(
        train=random.integers(model.vocab_size, size=n, dtype=dtype),
        val=np.zeros(0, dtype),
        val_bytes=0,
        context_length=model.context_length,
        batch_size=config.batch_size,
        seed=config.seed,
    )
