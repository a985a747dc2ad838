"""The loss of a batch: the cross-entropy of the next token.

The logits of a large vocabulary are the largest tensor of a step: on the CPU they are computed,
turned into their own gradient and consumed one chunk at a time, while they are in the cache.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tgen.config.training import Precision
from tgen.corpus import Batch
from tgen.model.precision import add_matmul, matmul, must_round, stored_product
from tgen.model.transformer import Transformer
from tgen.training.consistency import consistency_loss

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


def loss_sum(
    model: Transformer, batch: DeviceBatch, precision: Precision, consistency: float = 0.0
) -> Tensor:
    """Return (): the sum of the losses of all target tokens, nats; for `consistency`, see
    `consistency_loss`."""
    loss_mask = None if batch.loss_mask is None else batch.loss_mask.flatten()
    tokens, targets, documents = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.documents
    is_twice = model.training and consistency > 0
    if is_twice:
        tokens = torch.cat([tokens, tokens])
        documents = None if documents is None else torch.cat([documents, documents])
    with _autocast(tokens.device, precision):
        x = model.hidden_states(tokens, documents=documents).flatten(0, 1)
        x, weight = model.as_product(x)
        if is_twice:
            x = x.view(2, -1, x.shape[-1])
            return consistency_loss(x, weight, targets.flatten(), loss_mask, strength=consistency)
        return cross_entropy(x, weight, targets.flatten(), loss_mask)


class LossModule(nn.Module):
    """A model with its loss: the module that DDP and FSDP wrap."""

    def __init__(
        self,
        model: Transformer,
        *,
        precision: Precision = "float32",
        compiled: bool = False,
        consistency: float = 0.0,
    ) -> None:
        super().__init__()
        self.model, self.precision, self._consistency = model, precision, consistency
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
            return self._compiled(self.model, batch, self.precision, self._consistency)
        if not per_window:
            return loss_sum(self.model, batch, self.precision, self._consistency)
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


def _autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return a context of products in this precision on a GPU; see `product_precision`."""
    enabled = device.type == "cuda" and precision == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)
