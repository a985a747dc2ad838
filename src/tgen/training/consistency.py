"""Consistency regularization, R-Drop (Liang et al. 2021), against memorization.

Each window is computed twice, with different dropout masks. A token's loss is the mean of its two
cross-entropies, plus a strength times the mean of the Kullback-Leibler divergences between the two
predictions, in both directions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tgen.model.precision import add_matmul, matmul, must_round, stored_product

_CHUNK = 1 << 17  # logits of one of the two predictions at once
_MIN_ROWS = 128


def consistency_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_mask: Tensor | None = None,
    *,
    strength: float,
) -> Tensor:
    """Return (): the sum over targets in the mask, nats, of -(log p + log q)[target] / 2
    + strength (KL(p || q) + KL(q || p)) / 2, where p and q are softmax(x[i] weight^T), i = 0, 1.

    `x` (2, n, C), `weight` (V, C), `targets` (n,) int64, `loss_mask` (n,) bool; None: all targets.
    """
    if loss_mask is None:
        loss_mask = torch.ones_like(targets, dtype=torch.bool)
    with_grad = torch.is_grad_enabled()  # always off inside a Function
    total: Tensor = _Loss.apply(x, weight, targets, loss_mask, strength, with_grad)  # type: ignore[no-untyped-call]
    return total


class _Loss(torch.autograd.Function):
    """With d = log p - log q, the gradients of the sum of both divergences, (p - q) d, by the
    logits of p are p (d - E_p[d]) + p - q."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss_mask: Tensor,
        strength: float,
        with_grad: bool,
    ) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        x_grad = torch.empty_like(x) if with_grad and ctx.needs_input_grad[0] else None
        weight_grad = None
        if with_grad and ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight, dtype=dtype)
        if not torch.is_autocast_enabled(x.device.type):
            weight = weight.to(x.dtype)  # once, and never rounded to a stored dtype
        rounded = weight.bfloat16() if must_round(x) else weight
        total = x.new_zeros((), dtype=torch.float64)
        size = max(_MIN_ROWS, _CHUNK // len(weight))
        for i in range(0, x.shape[1], size):
            chunk, target = x[:, i : i + size], targets[None, i : i + size, None].expand(2, -1, 1)
            counts = loss_mask[i : i + size, None]  # multiplied by: a selection waits for a GPU
            log_p = stored_product(chunk, weight).to(dtype).log_softmax(-1)
            nats = -log_p.gather(2, target).sum(0) / 2
            p = log_p.exp()
            difference = log_p[0] - log_p[1]
            moved = p[0] - p[1]
            nats += strength / 2 * (moved * difference).sum(-1, keepdim=True)
            total += (nats * counts).sum(dtype=torch.float64)
            signed = torch.stack([difference, -difference])
            signed -= (p * signed).sum(-1, keepdim=True)
            grad = p * (0.5 + strength / 2 * signed)
            grad += strength / 2 * torch.stack([moved, -moved])
            grad.scatter_add_(2, target, grad.new_full((), -0.5).expand(target.shape))
            grad *= counts
            if x_grad is not None:
                x_grad[:, i : i + size] = matmul(grad, rounded)
            if weight_grad is not None:
                add_matmul(weight_grad, grad.flatten(0, 1).T, chunk.flatten(0, 1).to(dtype))
        ctx.save_for_backward(x_grad, weight_grad)
        return total.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        return (
            None if x_grad is None else x_grad * grad,
            None if weight_grad is None else weight_grad * grad,
            None,
            None,
            None,
            None,
        )
