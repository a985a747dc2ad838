"""The loss of a batch, and how well a model predicts the held-out text."""

import math
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tgen import distributed
from tgen.config import TrainConfig
from tgen.model.transformer import Transformer
from tgen.training.loss import cross_entropy
from tgen.training.uncertainty import bits_per_byte_error

# Tokens (B, T + 1); which targets count (B, T), None: all; each input's document (B, T), None: one.
Windows = tuple[NDArray[np.int64], NDArray[np.bool_] | None, NDArray[np.int32] | None]


class Batches(Protocol):
    """What training needs of a corpus: functions of the step, with no state of their own."""

    @property
    def context_length(self) -> int:
        """T, the inputs of a window."""

    @property
    def held_out_tokens(self) -> int:
        """Tokens of the held-out text that are scored."""

    @property
    def held_out_bytes(self) -> int:
        """Bytes of the held-out text whose tokens are scored; 0: there is none."""

    def batch(self, step: int, *, token_split: float = 0.0, rows: range | None = None) -> Windows:
        """Some of a step's windows of T + 1 tokens, a share of which may be taken apart."""

    def held_out_windows(self, max_tokens: int) -> Iterator[Windows]:
        """Windows of up to T + 1 tokens that predict each held-out token once."""

    def train_windows(self, max_tokens: int) -> Iterator[Windows]:
        """The same of text that was trained on, about `max_tokens` of it."""


class DeviceBatch(NamedTuple):
    """Windows on the model's device."""

    tokens: Tensor  # (B, T + 1)
    scored: Tensor | None  # (B, T)
    documents: Tensor | None  # (B, T)


def count_scored(windows: Windows) -> int:
    """Targets that count."""
    tokens, scored, _ = windows
    return tokens[:, 1:].size if scored is None else int(scored.sum())


def to_device(windows: Windows, device: torch.device) -> DeviceBatch:
    """Copies a batch of NumPy arrays there."""
    tensors = [None if a is None else torch.from_numpy(a) for a in windows]
    if device.type == "cuda":  # from pinned memory the copy need not be waited for
        tensors = [None if t is None else t.pin_memory() for t in tensors]
    moved = (None if t is None else t.to(device, non_blocking=True) for t in tensors)
    return DeviceBatch(*moved)  # type: ignore[arg-type]


def split(batch: DeviceBatch, n: int) -> list[DeviceBatch]:
    """`n` parts of about as many rows."""
    columns = [[None] * n if a is None else a.tensor_split(n) for a in batch]
    return [DeviceBatch(*part) for part in zip(*columns, strict=True)]


def loss_sum(model: Transformer, batch: DeviceBatch) -> Tensor:
    """(): nats of each scored token given those before it, added up."""
    scored = None if batch.scored is None else batch.scored.flatten()
    with _precision(batch.tokens.device):
        x = model.hidden(batch.tokens[:, :-1], documents=batch.documents).flatten(0, 1)
        return cross_entropy(x, model.head, batch.tokens[:, 1:].flatten(), scored)


class LossModule(nn.Module):
    """A model with its loss: what is computed as one where ranks share the work."""

    def __init__(self, model: Transformer, *, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self._compiled = torch.compile(loss_sum) if compiled else None

    def forward(self, batch: DeviceBatch, *, by_row: bool = False) -> Tensor:
        """(): nats of all scored tokens of the batch; `by_row`: (B,), those of each row."""
        if not by_row:
            return (self._compiled or loss_sum)(self.model, batch)
        with _precision(batch.tokens.device):
            hidden = self.model.hidden(batch.tokens[:, :-1], documents=batch.documents)
            nats = []
            for row, x in enumerate(hidden):
                scored = None if batch.scored is None else batch.scored[row]
                nats.append(cross_entropy(x, self.model.head, batch.tokens[row, 1:], scored))
        return torch.stack(nats)


class Evaluation(NamedTuple):
    """How well a text is predicted."""

    loss: float  # nats a token
    bits_per_byte: float
    standard_error: float | None  # of the bits per byte; None: a single window


def evaluate(
    learner: LossModule, batches: Batches, *, max_tokens: int = TrainConfig().eval_tokens
) -> Evaluation:
    """Of the held-out text, each scored token predicted once; ranks share the windows.

    Of a text of more than `max_tokens` only windows spread evenly over it are predicted.
    """
    bytes_per_token = batches.held_out_bytes / batches.held_out_tokens
    mine = _nats(learner, _shard_windows(batches.held_out_windows(max_tokens)))
    turns = zip_longest(*distributed.all_gather(mine), fillvalue=[])
    rows = [row for turn in turns for group in turn for row in group]
    if not rows:  # a text too short for one window
        return Evaluation(0.0, 0.0, None)
    x, n = np.array(rows).T
    loss = float(x.sum() / n.sum())
    to_bits = 1 / math.log(2) / bytes_per_token
    error = bits_per_byte_error(x, n * bytes_per_token)
    return Evaluation(loss, loss * to_bits, error if math.isfinite(error) else None)


def evaluate_train(model: Transformer, batches: Batches, *, max_tokens: int) -> float:
    """Nats a token on text that the model has learnt from; for one rank."""
    windows = ((group, True) for group in batches.train_windows(max_tokens))
    rows = np.concatenate([np.zeros((0, 2)), *_nats(LossModule(model), windows)])
    return float(rows[:, 0].sum() / max(1.0, rows[:, 1].sum()))


def _shard_windows(windows: Iterator[Windows]) -> Iterator[tuple[Windows, bool]]:
    """Every W-th group for each of W ranks, as many for all: one that does not count where a rank
    would have none, since all that share a model compute at once."""
    rank, n_ranks, *_ = distributed.ranks()
    while turn := list(islice(windows, n_ranks)):
        yield turn[min(rank, len(turn) - 1)], rank < len(turn)


@torch.no_grad()
def _nats(
    learner: LossModule, windows: Iterable[tuple[Windows, bool]]
) -> list[list[tuple[float, int]]]:
    """Of each group that counts, each row's nats and how many tokens they are of."""
    device = learner.model.token_embedding.weight.device
    learner.eval()
    found = []
    for group, counts in windows:
        nats = learner(to_device(group, device), by_row=True)
        if counts:
            tokens, scored, _ = group
            n = [tokens.shape[1] - 1] * len(tokens) if scored is None else scored.sum(1).tolist()
            found.append((nats, n))
    return [list(zip(nats.tolist(), n, strict=True)) for nats, n in found]


def _precision(device: torch.device) -> torch.autocast:
    """bfloat16 where it is fast."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
