"""Cross-entropy of the next token and its derivatives, computed in chunks of logits.

The logits of a large vocabulary are the largest tensor of a step. On the CPU they are computed,
turned into their own gradient and consumed one chunk at a time, while they are in the cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tgen.model.precision import add_matmul, matmul, must_round, stored_product

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
    """Return (3,): `cross_entropy` of logits times `logit_scale`, and its first and second
    derivative with respect to the scale: sums of E[z] - z_target and Var[z] of the logits z under
    the softmax."""
    if not torch.is_autocast_enabled(x.device.type):
        weight = weight.to(x.dtype)  # once, and never rounded to a stored dtype
    if loss_mask is not None and not loss_mask.all():
        x, targets = x[loss_mask], targets[loss_mask]
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = x.new_zeros(3, dtype=dtype)
    size = max(_MIN_ROWS, _CHUNK // len(weight))
    for i in range(0, len(x), size):
        logits = stored_product(x[i : i + size], weight).to(dtype)
        logits = logits - logits.amax(1, keepdim=True)  # small numbers, for the variance
        target = logits.gather(1, targets[i : i + size, None])
        weighted = (logits * logit_scale).exp_()
        total = weighted.sum(1, keepdim=True)
        nats = total.log() - logit_scale * target
        mean = weighted.mul_(logits).sum(1, keepdim=True) / total
        square = weighted.mul_(logits).sum(1, keepdim=True) / total
        sums += torch.cat([nats, mean - target, square - mean**2], 1).sum(0)
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
