"""The loss of a batch, and the evaluation on held-out text.

The loss is the cross-entropy of the next token. The logits of a large vocabulary are the largest
tensor of a step: on the CPU they are computed, turned into their own gradient and consumed one
chunk at a time, while they are in the cache.
"""

import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tgen import distributed
from tgen.config.training import Precision, ResolvedTrainConfig
from tgen.corpus import Batch, PackedRows, TokenDataset
from tgen.model.precision import add_matmul, matmul, must_round, stored_product
from tgen.model.transformer import Transformer
from tgen.reports.standard_error import bits_per_byte_error

_CHUNK = 1 << 18  # logits
_MIN_ROWS = 256  # per chunk: each reads the whole LM head from memory


def cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, loss_mask: Tensor | None = None
) -> Tensor:
    """Return (): the sum of -log softmax(x weight^T)[target], nats, over targets in the mask.

    `x` (n, C), `weight` (V, C), `targets` (n,) int64, `loss_mask` (n,) bool; None: all targets. A
    weight of another dtype is widened to that of x, and a frozen one gets no gradient.
    """
    if x.device.type != "cpu":
        nats = F.cross_entropy(stored_product(x, weight).float(), targets, reduction="none")
        return nats.sum() if loss_mask is None else nats.where(loss_mask, 0).sum()
    if loss_mask is not None and not loss_mask.all():
        x, targets = x[loss_mask], targets[loss_mask]
    with_grad = torch.is_grad_enabled()  # always off inside a Function
    total: Tensor = _ChunkedLoss.apply(x, weight, targets, with_grad)  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def loss_and_derivatives(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_mask: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
) -> Tensor:
    """Return (4,): `cross_entropy` of logits times `logit_scale`, its first and second derivative
    with respect to the scale, sums of E[z] - z_target and Var[z] of the logits z under the softmax,
    and the number of targets that greedy decoding would not choose."""
    if not torch.is_autocast_enabled(x.device.type):
        weight = weight.to(x.dtype)  # once, and never rounded to a stored dtype
    if loss_mask is not None and not loss_mask.all():
        x, targets = x[loss_mask], targets[loss_mask]
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = x.new_zeros(4, dtype=dtype)
    size = max(_MIN_ROWS, _CHUNK // len(weight))
    for i in range(0, len(x), size):
        logits = stored_product(x[i : i + size], weight).to(dtype)
        largest, best = logits.max(1, keepdim=True)  # the first of equal ones, as in generation
        logits = logits - largest  # small numbers, for the variance
        wanted = targets[i : i + size, None]
        target = logits.gather(1, wanted)
        weighted = (logits * logit_scale).exp_()
        total = weighted.sum(1, keepdim=True)
        nats = total.log() - logit_scale * target
        mean = weighted.mul_(logits).sum(1, keepdim=True) / total
        square = weighted.mul_(logits).sum(1, keepdim=True) / total
        # Three columns: more would be added in another order, to other bits.
        sums[:3] += torch.cat([nats, mean - target, square - mean**2], 1).sum(0)
        sums[3] += (best != wanted).sum()
    return sums


class _ChunkedLoss(torch.autograd.Function):
    """The gradient of a token's loss by its logits is softmax(logits) - onehot(target)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, with_grad: bool) -> Tensor:
        x_grad = torch.empty_like(x) if with_grad and ctx.needs_input_grad[0] else None
        weight_grad = None
        if with_grad and ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight)
        weight = weight.to(x.dtype)
        rounded = weight.bfloat16() if must_round(x) else weight
        total = x.new_zeros((), dtype=torch.float64)
        size = max(_MIN_ROWS, _CHUNK // len(weight))
        for i in range(0, len(x), size):
            chunk, target = x[i : i + size], targets[i : i + size, None]
            logits = chunk @ weight.T  # not rounded: an error of 1% in a logit is one of the loss
            logits -= logits.amax(1, keepdim=True)
            total -= logits.gather(1, target).sum(dtype=torch.float64)
            exp_sum = logits.exp_().sum(1, keepdim=True)
            total += exp_sum.log().sum(dtype=torch.float64)
            if x_grad is not None or weight_grad is not None:
                logits /= exp_sum
                logits.scatter_add_(1, target, torch.full_like(exp_sum, -1))
            if x_grad is not None:
                x_grad[i : i + size] = matmul(logits, rounded)
            if weight_grad is not None:
                add_matmul(weight_grad, logits.T, chunk)
            del logits  # before the next ones are allocated
        ctx.save_for_backward(x_grad, weight_grad)
        return total.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_grad, weight_grad = ctx.saved_tensors
        return (
            None if x_grad is None else x_grad * grad,
            None if weight_grad is None else weight_grad * grad,
            None,
            None,
        )


# Loss in nats, its derivatives with respect to the logits' scale, targets that greedy decoding
# would not choose, and number of target tokens.
WindowLoss = tuple[float, float, float, float, int]

Batches = TokenDataset | PackedRows  # functions of the step, without state

_MAX_PARTS = 64  # of an evaluation
_MAX_SCALE_STEP = 1.25  # of the logits, from one evaluation to the next


class DeviceBatch(NamedTuple):
    """Windows on the model's device."""

    tokens: Tensor  # (B, T + 1)
    loss_mask: Tensor | None  # (B, T)
    documents: Tensor | None  # (B, T)


def count_targets(windows: Batch) -> int:
    """Return the number of target tokens that contribute to the loss."""
    tokens, loss_mask, _ = windows
    return tokens[:, 1:].size if loss_mask is None else int(loss_mask.sum())


def to_device(windows: Batch, device: torch.device) -> DeviceBatch:
    """Copy a batch of NumPy arrays to a device."""
    tensors = [None if a is None else torch.from_numpy(a) for a in windows]
    on_cuda = device.type == "cuda"
    if on_cuda:  # pinned memory is copied asynchronously, and kept until then
        tensors = [None if t is None else t.pin_memory() for t in tensors]
    moved = (None if t is None else t.to(device, non_blocking=on_cuda) for t in tensors)
    return DeviceBatch(*moved)  # type: ignore[arg-type]


def split(batch: DeviceBatch, n: int) -> list[DeviceBatch]:
    """Split a batch into `n` micro-batches of about equal size."""
    columns = [[None] * n if a is None else a.tensor_split(n) for a in batch]
    return [DeviceBatch(*part) for part in zip(*columns, strict=True)]


def loss_sum(model: Transformer, batch: DeviceBatch, precision: Precision) -> Tensor:
    """Return (): the sum of the losses of all target tokens, nats."""
    loss_mask = None if batch.loss_mask is None else batch.loss_mask.flatten()
    with _autocast(batch.tokens.device, precision):
        x = model.hidden_states(batch.tokens[:, :-1], documents=batch.documents).flatten(0, 1)
        x, weight = model.as_product(x)
        return cross_entropy(x, weight, batch.tokens[:, 1:].flatten(), loss_mask)


class LossModule(nn.Module):
    """A model with its loss: the module that DDP and FSDP wrap."""

    def __init__(
        self, model: Transformer, *, precision: Precision = "float32", compiled: bool = False
    ) -> None:
        super().__init__()
        self.model, self.precision = model, precision
        self._compiled = torch.compile(loss_sum) if compiled else None

    def forward(
        self, batch: DeviceBatch, *, per_window: bool = False, logit_scale: float = 1.0
    ) -> Tensor:
        """Return (): the sum of the losses of the batch, nats; `per_window`: (B, 4), the sums
        of each window, see `loss_and_derivatives`."""
        self.model.reserve_positions(batch.tokens.shape[1] - 1)  # outside of compiled code
        if not per_window and self._compiled is not None:
            if batch.loss_mask is None:  # a batch with a mask, once per epoch, would compile again
                every = torch.ones_like(batch.tokens[:, 1:], dtype=torch.bool)
                batch = batch._replace(loss_mask=every)
            return self._compiled(self.model, batch, self.precision)
        if not per_window:
            return loss_sum(self.model, batch, self.precision)
        with _autocast(batch.tokens.device, self.precision):
            hidden = self.model.hidden_states(batch.tokens[:, :-1], documents=batch.documents)
            sums = []
            for i, x in enumerate(hidden):
                loss_mask = None if batch.loss_mask is None else batch.loss_mask[i]
                targets = batch.tokens[i, 1:]
                x, head = self.model.as_product(x)
                sums.append(
                    loss_and_derivatives(x, head, targets, loss_mask, logit_scale=logit_scale)
                )
        return torch.stack(sums)


class Evaluation(NamedTuple):
    """The validation loss."""

    loss: float  # nats per token
    bits_per_byte: float
    standard_error: float | None  # bits per byte, from the parts; None: a single part
    parts: list[float]  # nats per token of up to 64 parts of the text, to compare evaluations by
    best_logit_scale: float = 1.0  # expected to give the lowest loss


def evaluate(
    loss_module: LossModule,
    batches: Batches,
    *,
    max_tokens: int = ResolvedTrainConfig.eval_tokens,
    logit_scale: float = 1.0,
) -> Evaluation:
    """Predict each held-out target token once, with logits times `logit_scale`; ranks share the
    windows.

    If there are more than `max_tokens`, only windows spread evenly over the text are predicted.
    """
    bytes_per_token = batches.val_bytes / batches.val.n_targets
    windows = _shard_windows(batches.val_windows(max_tokens))
    local = _window_losses(loss_module, windows, logit_scale)
    rounds = zip_longest(*distributed.all_gather(local), fillvalue=[])
    losses = [group for groups in rounds for group in groups]
    return _summarize(losses, bytes_per_token, logit_scale)


def evaluate_alone(
    model: Transformer, batches: Batches, *, max_tokens: int = sys.maxsize
) -> Evaluation:
    """Predict each held-out target token once, by default all of them, on this rank."""
    windows = ((group, True) for group in batches.val_windows(max_tokens))
    losses = _window_losses(LossModule(model), windows)
    return _summarize(losses, batches.val_bytes / batches.val.n_targets)


def tokens_for_error(parts: Sequence[float], n_tokens: int, relative_error: float) -> int:
    """Return the tokens whose mean loss has this standard error relative to it, judged by the
    losses of `parts` of a text of `n_tokens`; no limit if they are too few to tell, or all 0."""
    if len(parts) < 2 or not any(parts):
        return sys.maxsize
    error = statistics.stdev(parts) / math.sqrt(len(parts)) / statistics.fmean(parts)
    return math.ceil(n_tokens * (error / relative_error) ** 2)


def _summarize(
    groups: list[list[WindowLoss]], bytes_per_token: float, logit_scale: float = 1.0
) -> Evaluation:
    losses = [window for group in groups for window in group]
    if not losses:  # the text is too short for one window
        return Evaluation(0.0, 0.0, None, [], logit_scale)
    nats, first, second, _, n_tokens = np.array(losses).T
    loss = float(nats.sum() / n_tokens.sum())
    bits_per_nat = 1 / math.log(2) / bytes_per_token
    # Neighboring windows are similar, so that single windows would make the error too small.
    n_parts = min(len(nats), _MAX_PARTS)
    part_nats, part_tokens = (
        np.array([part.sum() for part in np.array_split(values, n_parts)])
        for values in (nats, n_tokens)
    )
    error = bits_per_byte_error(part_nats, part_tokens * bytes_per_token)
    parts = [float(nats) for nats in part_nats / part_tokens]
    return Evaluation(
        loss,
        loss * bits_per_nat,
        error if math.isfinite(error) else None,
        parts,
        _newton_step(logit_scale, first.sum(), second.sum()),
    )


def _newton_step(scale: float, first: float, second: float) -> float:
    """Return a scale closer to the minimum of the loss, a convex function of the scale, from its
    derivatives."""
    if not (math.isfinite(first) and second > 0):
        return scale
    low, high = scale / _MAX_SCALE_STEP, scale * _MAX_SCALE_STEP
    return float(min(max(scale - first / second, low), high))


def evaluate_train(model: Transformer, batches: Batches, *, max_tokens: int) -> float:
    """Return the loss on training text, nats per token; for a single rank."""
    windows = ((group, True) for group in batches.train_windows(max_tokens))
    losses = np.concatenate([np.zeros((0, 5)), *_window_losses(LossModule(model), windows)])
    return float(losses[:, 0].sum() / max(1.0, losses[:, -1].sum()))


def count_exact(loss_module: LossModule, rows: Batches, *, max_tokens: int) -> tuple[int, int]:
    """Return how many of the training rows, one per window, greedy decoding reproduces, and how
    many were evaluated; ranks share them.

    After `max_tokens`, the first batch with a wrong row is the last that is evaluated.
    """
    n_exact = n_rows = n_tokens = 0
    windows = _shard_windows(rows.train_windows(sys.maxsize))
    while groups := list(islice(windows, 1)):
        local = _window_losses(loss_module, groups)
        losses = [
            loss for part in distributed.all_gather(local) for group in part for loss in group
        ]
        n_exact += sum(misses == 0 for *_, misses, _ in losses)
        n_rows += len(losses)
        n_tokens += sum(n for *_, n in losses)
        if n_tokens >= max_tokens and n_exact < n_rows:
            break
    return n_exact, n_rows


def _shard_windows(windows: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield every W-th group for each of W ranks, and whether it counts.

    All ranks get equally many, since ranks that share a model compute at the same time.
    """
    rank, n_ranks, *_ = distributed.ranks()
    while groups := list(islice(windows, n_ranks)):
        yield groups[min(rank, len(groups) - 1)], rank < len(groups)


@torch.no_grad()
def _window_losses(
    loss_module: LossModule, groups: Iterable[tuple[Batch, bool]], logit_scale: float = 1.0
) -> list[list[WindowLoss]]:
    """Return the losses of each window, for groups that count."""
    device = loss_module.model.token_embedding.weight.device
    loss_module.eval()
    results = []
    for group, counts in groups:
        batch = to_device(group, device)
        sums = loss_module(batch, per_window=True, logit_scale=logit_scale)
        if counts:
            tokens, mask, _ = group
            n = [tokens.shape[1] - 1] * len(tokens) if mask is None else mask.sum(1).tolist()
            results.append((sums, n))
    return [
        [(*window, count) for window, count in zip(sums.tolist(), n, strict=True)]
        for sums, n in results
    ]


def _autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return a context of products in this precision on a GPU; see `product_precision`."""
    enabled = device.type == "cuda" and precision == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)
