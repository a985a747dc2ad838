"""Train low-rank changes of a frozen transformer: x W^T + scale (x A^T) B^T for some rows of W.

Frozen weights are buffers without gradients. Matrices stay float32, bfloat16 or float16, as in the
file, and are widened to the dtype of their input one at a time while they are used. Vectors are
float32, since norms compute in the dtype of their weight.

A product with its changes is one autograd function, because autograd would keep a temporary of the
size of the output per operation. All A of a matrix are one product, and each B is added in place.
Only x, which the matrices with the same input share, and the short x A^T are kept for the backward
pass.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tgen.config import ModelConfig
from tgen.lora.matrices import Layout, Pair, Part, Shape, sample_a
from tgen.model.precision import matmul, stored_product
from tgen.model.transformer import Linear, Transformer, stored_tensor


class FrozenLinear(nn.Module):
    """A linear layer whose weight and bias are buffers."""

    weight: Tensor  # (out, in)
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not torch.is_grad_enabled():
            return stored_product(x, self.weight, self.bias)
        out: Tensor = _FrozenProduct.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


class FrozenEmbedding(nn.Module):
    """An embedding table that is a buffer; only the rows in use are widened."""

    weight: Tensor  # (n, C)

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(...,) int64 -> (..., C) float32."""
        return F.embedding(tokens, self.weight).float()


class _FrozenProduct(torch.autograd.Function):
    """x W^T with a gradient for x alone; keeps W as it is stored, and not x."""

    @staticmethod
    @torch.amp.custom_fwd(  # type: ignore[untyped-decorator]
        device_type="cuda", cast_inputs=torch.bfloat16
    )
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        out = matmul(x, weight.T)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        return matmul(grad, weight) if ctx.needs_input_grad[0] else None, None, None


def frozen_transformer(
    config: ModelConfig, arrays: Mapping[str, NDArray[Any]], *, dropout: float = 0.0
) -> Transformer:
    """Return a model without parameters whose weights share the memory of `arrays`, where those are
    not vectors of another dtype than float32."""
    with torch.device("meta"):
        model = Transformer(config, dropout=dropout)
    model.make_tables()
    for path, module in list(model.named_modules()):
        names = [name for name, _ in module.named_parameters(recurse=False)]
        tensors = {name: stored_tensor(arrays[f"{path}.{name}"]) for name in names}
        tensors = {name: t.float() if t.ndim == 1 else t for name, t in tensors.items()}
        if isinstance(module, Linear):
            replacement = FrozenLinear(tensors["weight"], tensors.get("bias"))
            _replace(model, path, replacement)
        elif isinstance(module, nn.Embedding):
            _replace(model, path, FrozenEmbedding(tensors["weight"]))
        else:
            for name in names:
                delattr(module, name)
                module.register_buffer(name, tensors[name], persistent=False)
    return model


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


@dataclass(frozen=True)  # `custom_fwd` rebuilds tuples, which fails for a NamedTuple
class Rows:
    """Rows of the matrix that one pair changes."""

    start: int
    n_rows: int
    rank: int
    scale: float


class LowRankLinear(FrozenLinear):
    """A frozen linear layer with pairs (A, B) that are trained."""

    def __init__(
        self, frozen: FrozenLinear, rows: Sequence[Rows], a: nn.Parameter, b: Sequence[nn.Parameter]
    ) -> None:
        """`a` (sum of ranks, in) has the A of all `rows`, `b` (n_rows, rank) is one B for each."""
        super().__init__(frozen.weight, frozen.bias)
        self.rows = tuple(rows)
        self.a, self.b = a, nn.ParameterList(b)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not torch.is_grad_enabled():
            flat = x.reshape(-1, x.shape[-1])
            out = stored_product(flat, self.weight, self.bias)
            _add_changes(out, flat, self.rows, self.a, self.b)
            return out.view(*x.shape[:-1], -1)
        b = [self.b[i] for i in range(len(self.rows))]  # torch 2.11 compiles no unpacking of a list
        inputs = x, self.weight, self.bias, self.rows, self.a, *b
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


def attach(model: Transformer, layout: Layout, shapes: Mapping[str, Shape], *, seed: int) -> None:
    """Replace the frozen matrices that `shapes` has pairs for; the logits do not change, because
    every B is zero. Matrices that are parts of one of transformers' share its A."""
    shared: dict[tuple[str, ...], nn.Parameter] = {}
    for name, parts, linear in _adapted(model, layout, shapes):
        key = tuple(part.pair for part in parts)
        if key not in shared:
            a = [sample_a(p.pair, shapes[p.pair].rank, p.n_inputs, seed) for p in parts]
            shared[key] = nn.Parameter(torch.from_numpy(np.concatenate(a)))
        b = [nn.Parameter(torch.zeros(p.n_rows, shapes[p.pair].rank)) for p in parts]
        rows = [Rows(p.start, p.n_rows, *shapes[p.pair]) for p in parts]
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        module = LowRankLinear(linear, rows, shared[key], b)
        setattr(model.get_submodule(parent), last, module)


def pairs_of(model: Transformer, layout: Layout, shapes: Mapping[str, Shape]) -> dict[str, Pair]:
    """Return copies of the pairs of a model on the CPU; DTensors are not supported."""
    pairs: dict[str, Pair] = {}
    for name, parts, linear in _adapted(model, layout, shapes):
        assert isinstance(linear, LowRankLinear), name
        a = linear.a.detach().cpu().numpy()
        column = 0
        for part, b in zip(parts, linear.b, strict=True):
            rank, scale = shapes[part.pair]
            if part.pair not in pairs:
                whole = np.empty((part.pair_rows, rank), np.float32)
                pairs[part.pair] = Pair(a[column : column + rank].copy(), whole, scale)
            target = pairs[part.pair].b[part.pair_start : part.pair_start + part.n_rows]
            target[:] = b.detach().cpu().numpy()
            column += rank
    return pairs


def load_pairs(model: Transformer, layout: Layout, pairs: Mapping[str, Pair]) -> None:
    """Copy pairs into the parameters of `attach`, with B for the scales of those."""
    with torch.no_grad():
        for name, parts, linear in _adapted(model, layout, pairs):
            assert isinstance(linear, LowRankLinear), name
            a = np.concatenate([pairs[part.pair].a for part in parts])
            linear.a.copy_(torch.from_numpy(a))
            for part, rows, b in zip(parts, linear.rows, linear.b, strict=True):
                pair = pairs[part.pair]
                own = pair.b[part.pair_start : part.pair_start + part.n_rows]
                b.copy_(torch.from_numpy(own * np.float32(pair.scale / rows.scale)))


def _adapted(
    model: Transformer, layout: Layout, pairs: Container[str]
) -> list[tuple[str, list[Part], FrozenLinear]]:
    """Return the matrices with pairs: their name, the parts with a pair, and the layer."""
    found = []
    for name, every in layout.items():
        if parts := [part for part in every if part.pair in pairs]:
            linear = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(linear, FrozenLinear), name
            found.append((name, parts, linear))
    return found
