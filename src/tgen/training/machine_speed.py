"""Measure the training speed of this machine: a few passes of a small model, a few real steps.

The steps belong to a run on random tokens, advanced report by report through the loop of
`tgen train`, with its loss and optimizers, but without document ends and BPE-dropout. They take as
long as those of `tgen train`: the duration of a step does not depend on the token ids.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from tgen.config import SIZES, ModelConfig
from tgen.config.training import Precision, ResolvedTrainConfig
from tgen.corpus import TokenDataset, Tokens
from tgen.machine.memory import retain_freed_memory
from tgen.model.precision import product_precision
from tgen.model.transformer import Transformer
from tgen.planning.costs import MeasuredStep
from tgen.training.loop import train
from tgen.training.loss import DeviceBatch, loss_sum
from tgen.training.optimizers import Muon
from tgen.training.state import new_state

_UNLIMITED = 1 << 40  # steps
_MIN_TOKENS = 1 << 20
_SHORT_SECONDS = 0.2  # of a measurement: in less time, two passes of a whole batch do not fit
_VOCAB_SIZE = 1024
_CONTEXT_LENGTH = 128  # fixed: the constants of `step_seconds` were measured with it
MIN_STEPS, _MAX_STEPS, _MUON_STEPS = 4, 20, 3


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
        train=Tokens(random.integers(model.vocab_size, size=n, dtype=dtype)),
        val=Tokens(np.zeros(0, dtype)),
        val_bytes=0,
        context_length=model.context_length,
        batch_size=config.batch_size,
        seed=config.seed,
    )


def measure_speed(device: torch.device, precision: Precision, *, seconds: float) -> float:
    """Return the FLOP per second of training, counted as six per parameter and token.

    Takes about `seconds`, at least two passes.
    """
    if device.type == "cpu":
        retain_freed_memory()  # as in training
    started = time.perf_counter()
    size, batch_size = ("tiny", 8) if device.type == "cpu" else ("medium", 64)
    if seconds < _SHORT_SECONDS:
        batch_size //= 4
    shape = {**SIZES[size], "context_length": _CONTEXT_LENGTH}
    config = ModelConfig.of("qwen3", **shape, vocab_size=_VOCAB_SIZE)
    model = Transformer(config).to(device)
    n_parameters = sum(p.numel() for p in model.parameters())
    tokens = torch.arange(batch_size * (config.context_length + 1)) % _VOCAB_SIZE
    batch = DeviceBatch(tokens.view(batch_size, -1).to(device), None, None)
    times: list[float] = []
    while len(times) < 2 or (time.perf_counter() - started < seconds and len(times) < 20):
        pass_started = time.perf_counter()
        with product_precision(precision):
            loss = loss_sum(model, batch, precision)
            loss.backward()  # type: ignore[no-untyped-call]
        loss.item()  # waits for the device
        times.append(time.perf_counter() - pass_started)
    return 6 * n_parameters * batch_size * config.context_length / statistics.median(times[1:])


def measure_step(
    model: ModelConfig, config: ResolvedTrainConfig, device: torch.device, *, seconds: float
) -> MeasuredStep:
    """Return the median duration of training steps, with windows of the full context.

    Takes about `seconds`, at least `MIN_STEPS` steps: the first one does not count.
    """
    started = time.perf_counter()
    run = RandomRun(model, config, device)
    run.advance(1)
    times: list[float] = []
    while len(times) + 1 < MIN_STEPS or (
        time.perf_counter() - started < seconds and len(times) < _MAX_STEPS
    ):
        began = time.perf_counter()
        n_steps = run.advance(1)  # more on a GPU
        times.append((time.perf_counter() - began) / n_steps)
    muon_times = [0.0]
    for optimizer in run.state.optimizers:
        if isinstance(optimizer, Muon):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            with product_precision(config.precision):
                muon_times = [_timed(optimizer.step, device) for _ in range(_MUON_STEPS)]
    n_tokens = config.passes * config.batch_size * model.context_length
    return MeasuredStep(n_tokens, statistics.median(times), statistics.median(muon_times))


def _timed(function: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started
