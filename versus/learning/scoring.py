"""One scorer for all models: bits per byte of a text; each byte is predicted exactly once.

A model is a tokenizer, a function from tokens to logits, and a context length. Bits per byte of
text compare models with different tokenizers.

Shapes: B windows, T tokens per window, V vocabulary
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]

_BATCH_TOKENS = 8192
_TOLERANCE = 1e-4  # relative, of a window's nats: one float32 pass against one pass per token


@dataclass(frozen=True)
class Predictor:
    """A trained model."""

    encode: Callable[[bytes], Ids]
    logits: Callable[[Tensor], Tensor]  # (B, T) int64 -> (B, T, V)
    context_length: int


def bits_per_byte(model: Predictor, before: bytes, text: bytes) -> float:
    """Return the model's bits per byte of `text`, which follows `before`.

    Windows have the model's context length. They overlap by one token, which is only input: the
    last one of the previous window, or of `before`. Raises AssertionError if three windows, scored
    again token by token, have other losses.
    """
    stream = np.concatenate([model.encode(before)[-1:], model.encode(text)])
    _verify(model, stream)
    nats = sum(_nats(model, batch) for batch in windows(stream, model.context_length))
    return nats / math.log(2) / len(text)


def windows(stream: Ids, context_length: int) -> Iterator[Ids]:
    """Split (n,) into batches (B, up to context_length + 1) that predict stream[1:] once."""
    starts = np.arange(0, len(stream) - 1, context_length)
    n_full = (len(stream) - 1) // context_length
    size = max(1, _BATCH_TOKENS // context_length)
    for i in range(0, n_full, size):
        full = starts[i : min(i + size, n_full)]
        yield stream[full[:, None] + np.arange(context_length + 1)]
    if n_full < len(starts):
        yield stream[None, starts[-1] :]


@torch.no_grad()
def _nats(model: Predictor, tokens: Ids) -> float:
    """Return the total nats of (B, T + 1), without each window's first token."""
    logits = model.logits(torch.from_numpy(tokens[:, :-1]))
    targets = torch.from_numpy(tokens[:, 1:])
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return float(losses.double().sum())


@torch.no_grad()
def _slow_nats(model: Predictor, window: Ids) -> float:
    """Return the nats of one window (T + 1,), with one pass per token, on the past only."""
    nats = 0.0
    for i in range(1, len(window)):
        logits = model.logits(torch.from_numpy(window[None, :i]))[0, -1].double().numpy()
        highest = logits.max()
        nats += highest + math.log(np.exp(logits - highest).sum()) - logits[window[i]]
    return nats


def _verify(model: Predictor, stream: Ids) -> None:
    """Score the first, the middle and the last window both ways."""
    length = model.context_length
    n_windows = math.ceil((len(stream) - 1) / length)
    for i in sorted({0, n_windows // 2, n_windows - 1}):
        window = stream[i * length : (i + 1) * length + 1]
        fast, slow = _nats(model, window[None]), _slow_nats(model, window)
        if abs(fast - slow) > _TOLERANCE * slow:
            raise AssertionError(f"window {i} has {fast} nats in one pass, {slow} token by token")
