"""One scorer for every model: bits per byte of a text, each of its bytes predicted exactly once.

A model is three things here: how bytes become tokens, how tokens become logits, and how far it
looks back. Bits are counted per byte of the text, so that models with different tokens compare.

Shapes:  B windows · T tokens of a window · V vocabulary
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
_TOLERANCE = 1e-4  # of a window's nats, between one pass in float32 and many in float64


@dataclass(frozen=True)
class Predictor:
    """A trained model, whoever trained it."""

    encode: Callable[[bytes], Ids]
    logits: Callable[[Tensor], Tensor]  # (B, T) int64 -> (B, T, V)
    context_length: int


def bits_per_byte(model: Predictor, before: bytes, text: bytes) -> float:
    """Bits that `text`, which follows `before`, costs under the model, per byte of `text`.

    Windows of the model's own context do not overlap, but for the first token of each: it is the
    last of the one before, and for the first window the last token of `before`. Raises
    AssertionError if a few windows, scored again one token at a time, come out differently.
    """
    stream = np.concatenate([model.encode(before)[-1:], model.encode(text)])
    _verify(model, stream)
    nats = sum(_nats(model, batch) for batch in windows(stream, model.context_length))
    return nats / math.log(2) / len(text)


def windows(stream: Ids, context_length: int) -> Iterator[Ids]:
    """(n,) -> (B, up to context_length + 1) each; together they predict stream[1:] once."""
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
    """Nats of every token of (B, T + 1) but each window's first, all together."""
    logits = model.logits(torch.from_numpy(tokens[:, :-1]))
    targets = torch.from_numpy(tokens[:, 1:])
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return float(each.double().sum())


@torch.no_grad()
def _slow_nats(model: Predictor, window: Ids) -> float:
    """As `_nats` for one window (T + 1,): a pass a token, which sees nothing but its past."""
    nats = 0.0
    for i in range(1, len(window)):
        scores = model.logits(torch.from_numpy(window[None, :i]))[0, -1].double().numpy()
        highest = scores.max()
        nats += highest + math.log(np.exp(scores - highest).sum()) - scores[window[i]]
    return nats


def _verify(model: Predictor, stream: Ids) -> None:
    """The first window, one in the middle, and the last, both ways."""
    length = model.context_length
    n_windows = math.ceil((len(stream) - 1) / length)
    for i in sorted({0, n_windows // 2, n_windows - 1}):
        window = stream[i * length : (i + 1) * length + 1]
        fast, slow = _nats(model, window[None]), _slow_nats(model, window)
        if abs(fast - slow) > _TOLERANCE * slow:
            raise AssertionError(f"window {i} scores {fast} nats at once, {slow} token by token")
