"""The precision of matrix products: rounded inputs with float32 sums, or a matrix as it is stored.

Products of float32 matrices may round their inputs: to bfloat16 on a CPU, to TF32 on CUDA, where
autocast rounds most of them to bfloat16 before. CPUs with AMX or AVX512_BF16 compute them faster.
The setting is global in torch, but oneDNN obeys it only with AMX: on other CPUs, `linear` and
`matmul` round inputs and results themselves. With AMX it also reaches the small products inside
torch's fused attention, which it makes slower: that kernel is excluded.

A stored matrix may also be bfloat16 or float16, and is multiplied by float32 vectors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tgen.config.training import Precision

_MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
_NAMES: dict[Precision, str] = {"float32": "ieee", "bfloat16": "bf16"}
_FEW_ROWS = 32  # with fewer, widening the matrix takes longer than the product


@contextmanager
def product_precision(precision: Precision) -> Iterator[None]:
    """Compute the products of float32 matrices in this precision, backward passes included."""
    cuda: Any = torch.backends.cuda.matmul
    before = _MATMUL.fp32_precision, cuda.fp32_precision
    _set(_NAMES[precision])
    cuda.fp32_precision = "tf32" if precision == "bfloat16" else "ieee"
    try:
        yield
    finally:
        _set(before[0])
        cuda.fp32_precision = before[1]


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 faster than float32, as far as torch tells."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return has_bfloat16_units((properties.major, properties.minor))
    has_units = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()  # not in all versions
    return device.type == "cpu" and (_has_amx() or has_units)


def has_bfloat16_units(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this CUDA capability computes bfloat16; older ones emulate it slowly."""
    return capability >= (8, 0)


def products_are_bfloat16() -> bool:
    """Whether products have the precision bfloat16 now."""
    return bool(_MATMUL.fp32_precision == _NAMES["bfloat16"])


def round_input(x: Tensor) -> Tensor:
    """Return x in the dtype that `linear` rounds to, so that later operations need no copies."""
    return x.bfloat16() if must_round(x) else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, (..., in) -> (..., out), in the precision of products and dtype of x."""
    if not must_round(x):
        return stored_product(x, weight, bias)
    out: Tensor = _RoundedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the dtype of a and the precision of products, without gradients."""
    if not must_round(a):
        return a @ b.to(a.dtype)
    return (a.bfloat16() @ b.bfloat16()).to(a.dtype)


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `matmul(a, b)` to `out`."""
    if must_round(a):
        out += matmul(a, b)
    else:
        out.addmm_(a, b)


def must_round(x: Tensor) -> bool:
    """Whether products with x have the precision bfloat16, but oneDNN does not round them."""
    return x.device.type == "cpu" and products_are_bfloat16() and not _has_amx()


def in_full_precision(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return attention(q, k, v). On a CPU, it and its gradients are computed in float32."""
    if q.device.type != "cpu" or not products_are_bfloat16():
        return attention(q, k, v)
    full, reduced = _NAMES["float32"], _NAMES["bfloat16"]
    out = attention(*_Switch.apply(full, reduced, q, k, v))  # type: ignore[no-untyped-call]
    (result,) = _Switch.apply(reduced, full, out)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


class _RoundedLinear(torch.autograd.Function):
    """x W^T from inputs rounded to bfloat16, which are kept for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = x.dtype
        x, weight = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, None if bias is None else bias.bfloat16()).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rounded = grad.bfloat16()
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (rounded @ weight).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = (rounded.flatten(0, -2).T @ x.flatten(0, -2)).float()
        if ctx.needs_input_grad[2]:
            bias_grad = grad.flatten(0, -2).sum(0, dtype=torch.float32)
        return x_grad, weight_grad, bias_grad


class _Switch(torch.autograd.Function):
    """Passes tensors on, and sets the precision of what follows in each direction."""

    @staticmethod
    def forward(ctx: Any, forward: str, backward: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_precision = backward
        _set(forward)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        _set(ctx.backward_precision)
        return None, None, *gradients


def _has_amx() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())  # not in all versions


def _set(name: str) -> None:
    _MATMUL.fp32_precision = name


def stored_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, (..., in) -> (..., out); the matrix is widened to the dtype of x.

    A few rows without gradients, as in generation, are rounded to bfloat16 instead.
    """
    if weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    n_rows = x.numel() // x.shape[-1]
    if weight.dtype == torch.bfloat16 and n_rows <= _FEW_ROWS and not torch.is_grad_enabled():
        out = F.linear(x.bfloat16(), weight).to(x.dtype)
        return out if bias is None else out + bias
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
