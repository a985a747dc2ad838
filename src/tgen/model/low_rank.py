"""A frozen matrix with trained low-rank changes of some of its rows: x W^T + scale (x A^T) B^T.

Everything happens in one autograd function, because autograd would keep a temporary of the size of
the output per operation. All A of a matrix are one product, and each B is added in place. Only x,
which the matrices with the same input share, and the short x A^T are kept for the backward pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tgen.model.frozen import FrozenLinear
from tgen.model.product_precision import matmul
from tgen.model.stored_product import stored_product


@dataclass(frozen=True)  # `custom_fwd` rebuilds tuples, which fails for a NamedTuple
class Rows:
    """Rows of the matrix that one pair changes."""

    start: int
    n_rows: int
    rank: int
    scale: float


class LowRankLinear(nn.Module):
    """A frozen linear layer with pairs (A, B) that are trained."""

    weight: Tensor  # (out, in), frozen
    bias: Tensor | None

    def __init__(
        self, frozen: FrozenLinear, rows: Sequence[Rows], a: nn.Parameter, b: Sequence[nn.Parameter]
    ) -> None:
        """`a` (sum of ranks, in) has the A of all `rows`, `b` (n_rows, rank) is one B for each."""
        super().__init__()
        self.register_buffer("weight", frozen.weight, persistent=False)
        self.register_buffer("bias", frozen.bias, persistent=False)
        self.rows = tuple(rows)
        self.a, self.b = a, nn.ParameterList(b)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not torch.is_grad_enabled():
            flat = x.reshape(-1, x.shape[-1])
            out = stored_product(flat, self.weight, self.bias)
            _add_changes(out, flat, self.rows, self.a, self.b)
            return out.view(*x.shape[:-1], -1)
        inputs = x, self.weight, self.bias, self.rows, self.a, *self.b
        return _LowRankProduct.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


class _LowRankProduct(torch.autograd.Function):
    """Gradients for x, A and B; W is widened again in the backward pass."""

    @staticmethod
    @torch.amp.custom_fwd(  # type: ignore[untyped-decorator]
        device_type="cuda", cast_inputs=torch.bfloat16
    )
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Sequence[Rows],
        a: Tensor,
        *bs: Tensor,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = matmul(flat, weight.T)
        if bias is not None:
            out += bias
        reduced = _add_changes(out, flat, rows, a, bs)
        ctx.save_for_backward(x, weight, reduced, a, *bs)
        ctx.rows = rows
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Any, ...]:
        x, weight, reduced, a, *bs = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        reduced_grad = torch.empty_like(reduced)
        b_grads, column = [], 0
        for part, b in zip(ctx.rows, bs, strict=True):
            columns = slice(column, column + part.rank)
            column += part.rank
            own = grad[:, part.start : part.start + part.n_rows]
            reduced_grad[:, columns] = (own @ b).mul_(part.scale)
            b_grads.append((own.T @ reduced[:, columns]).mul_(part.scale))
        a_grad = reduced_grad.T @ x.reshape(-1, x.shape[-1])
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = matmul(grad, weight).addmm_(reduced_grad, a).view(x.shape)
        return x_grad, None, None, None, a_grad, *b_grads


def _add_changes(
    out: Tensor, x: Tensor, rows: Sequence[Rows], a: Tensor, bs: Iterable[Tensor]
) -> Tensor:
    """Add scale (x A^T) B^T to the rows' columns of `out` (n, out); return x A^T (n, ranks)."""
    reduced = x @ a.T
    parts = reduced.split_with_sizes([part.rank for part in rows], dim=1)
    for part, y, b in zip(rows, parts, bs, strict=True):
        changed = out[:, part.start : part.start + part.n_rows]
        changed.addmm_(y, b.T.to(y.dtype), alpha=part.scale)  # autocast skips operations in place
    return reduced
