"""How fast this machine trains: a few passes of a small model, timed."""

import statistics
import time

import torch

from tgen.config import SIZES, ModelConfig
from tgen.model.transformer import Transformer
from tgen.training.evaluation import DeviceBatch, loss_sum

_VOCAB_SIZE = 1024


def measure_speed(device: torch.device, *, seconds: float) -> float:
    """Useful floating-point operations a second of training, counted as six a weight and token.

    Takes about `seconds`, two passes at least.
    """
    began = time.perf_counter()
    size, rows = ("tiny", 8) if device.type == "cpu" else ("medium", 32)
    config = ModelConfig.of("qwen3", **SIZES[size], vocab_size=_VOCAB_SIZE)
    model = Transformer(config).to(device)
    n_weights = sum(p.numel() for p in model.parameters())
    tokens = torch.arange(rows * (config.context_length + 1)) % _VOCAB_SIZE
    batch = DeviceBatch(tokens.view(rows, -1).to(device), None, None)
    times: list[float] = []
    while len(times) < 2 or (time.perf_counter() - began < seconds and len(times) < 20):
        started = time.perf_counter()
        loss = loss_sum(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        loss.item()  # waits for the device
        times.append(time.perf_counter() - started)
    return 6 * n_weights * rows * config.context_length / statistics.median(times[1:])
