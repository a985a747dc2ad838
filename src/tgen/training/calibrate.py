"""Measure the training speed of this machine: a few passes of a small model, a few real steps."""

import statistics
import time

import torch

from tgen.config import SIZES, ModelConfig, Precision, ResolvedTrainConfig
from tgen.model.product_precision import product_precision
from tgen.model.transformer import Transformer
from tgen.training.evaluation import DeviceBatch, loss_sum
from tgen.training.random_run import RandomRun

_VOCAB_SIZE = 1024
MIN_STEPS, _MAX_STEPS = 4, 20


def measure_speed(device: torch.device, precision: Precision, *, seconds: float) -> float:
    """Return the FLOP per second of training, counted as six per parameter and token.

    Takes about `seconds`, at least two passes.
    """
    started = time.perf_counter()
    size, batch_size = ("tiny", 8) if device.type == "cpu" else ("medium", 32)
    config = ModelConfig.of("qwen3", **SIZES[size], vocab_size=_VOCAB_SIZE)
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


def measure_step(model: ModelConfig, config: ResolvedTrainConfig, *, seconds: float) -> float:
    """Return the median seconds of training steps on the CPU, with windows of the full context.

    Takes about `seconds`, at least `MIN_STEPS` steps: the first one does not count.
    """
    started = time.perf_counter()
    run = RandomRun(model, config, torch.device("cpu"))
    run.advance(1)
    times: list[float] = []
    while len(times) + 1 < MIN_STEPS or (
        time.perf_counter() - started < seconds and len(times) < _MAX_STEPS
    ):
        step_started = time.perf_counter()
        run.advance(1)
        times.append(time.perf_counter() - step_started)
    return statistics.median(times)
