"""The loss: cross-entropy of the next token, without ever holding all logits at once.

The scores of a large vocabulary are the largest tensor of a step. On a processor they are made,
turned into their own gradient and used up a piece at a time, while they are in the cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_PIECE = 1 << 18  # logits at a time


def cross_entropy(x: Tensor, head: Tensor, targets: Tensor, scored: Tensor | None = None) -> Tensor:
    """The sum of -log softmax(x head^T)[target], nats, over the scored targets.

    `x` (n, C), `head` (V, C), `targets` (n,) int64, `scored` (n,) bool; None: all of them.
    """
    if x.device.type != "cpu":
        nats = F.cross_entropy(F.linear(x, head).float(), targets, reduction="none")
        return nats.sum() if scored is None else nats.where(scored, 0).sum()
    if scored is not None and not scored.all():
        x, targets = x[scored], targets[scored]
    learning = torch.is_grad_enabled()  # inside a Function it no longer shows
    total: Tensor = _InPieces.apply(x, head, targets, learning)  # type: ignore[no-untyped-call]
    return total


class _InPieces(torch.autograd.Function):
    """With softmax p, the gradient of a row's loss by its logits is p - onehot(target)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, targets: Tensor, learning: bool) -> Tensor:
        x_grad = torch.empty_like(x) if learning else None
        head_grad = torch.zeros_like(head) if learning else None
        total = x.new_zeros((), dtype=torch.float64)
        rows = max(1, _PIECE // len(head))
        for i in range(0, len(x), rows):
            piece, target = x[i : i + rows], targets[i : i + rows, None]
            logits = piece @ head.T
            logits -= logits.amax(1, keepdim=True)
            total -= logits.gather(1, target).sum(dtype=torch.float64)
            exp_sum = logits.exp_().sum(1, keepdim=True)
            total += exp_sum.log().sum(dtype=torch.float64)
            if x_grad is not None and head_grad is not None:
                logits /= exp_sum
                logits.scatter_add_(1, target, torch.full_like(exp_sum, -1))
                torch.mm(logits, head, out=x_grad[i : i + rows])
                head_grad.addmm_(logits.T, piece)
        ctx.save_for_backward(x_grad, head_grad)
        return total.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_grad, head_grad = ctx.saved_tensors
        return x_grad * grad, head_grad * grad, None, None
