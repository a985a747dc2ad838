"""Elementwise parts of the model for training on a CPU, with few passes over memory.

Torch computes RMSNorm and RoPE on a CPU as many operations, and stores the results of each for the
backward pass. These functions store only what they need, and work in place.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# A tensor, because addcmul needs one; without dimensions, so that results keep the dtype of x.
_GELU_A = torch.tensor(2 * math.sqrt(2 / math.pi), dtype=torch.float64)
_GELU_B = 0.044715 * _GELU_A.item()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, (..., n) -> (..., n)."""
    if not _is_faster(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i+n/2}) of the first n dimensions by its angle.

    x (B, H, T, D); cos and sin (..., T, n/2).
    """
    if _is_faster(x) and 2 * cos.shape[-1] == x.shape[-1]:
        out: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return out
    half = cos.shape[-1]
    x1, x2, unrotated = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    return torch.cat([*rotated, unrotated] if unrotated.shape[-1] else rotated, dim=-1)


def gelu_tanh(x: Tensor) -> Tensor:
    """GPT-2's approximation of GELU, x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2."""
    if not _is_faster(x):
        return F.gelu(x, approximate="tanh")
    out: Tensor = _GeluTanh.apply(x)  # type: ignore[no-untyped-call]
    return out


def _is_faster(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.is_grad_enabled()


class _RMSNorm(torch.autograd.Function):
    """With y = x / rms(x) and g the gradient of y: g_x = (g - y mean(g y)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        factors = lengths.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factors)
        out: Tensor = (x * factors).mul_(weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, factors = ctx.saved_tensors
        y = x * factors
        products = grad * y
        means = (products * weight).mean(-1, keepdim=True)  # a matrix product might be rounded
        weight_grad = products.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        x_grad = torch.mul(grad, weight, out=products).addcmul_(y, means, value=-1).mul_(factors)
        return x_grad, weight_grad, None


class _GeluTanh(torch.autograd.Function):
    """x s with s = sigmoid(x (a + b x^2)), which is the same function: torch's sigmoid on a CPU is
    four times as fast as its tanh. The derivative is s + (s - s^2) x (a + 3 b x^2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _to_float32(x)
        s = torch.addcmul(_GELU_A, y, y, value=_GELU_B).mul_(y).sigmoid_()
        ctx.save_for_backward(x, s)
        return (s * y).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, s = ctx.saved_tensors
        y = _to_float32(x)
        slope = torch.addcmul(_GELU_A, y, y, value=3 * _GELU_B).mul_(y)
        sigmoid_slope = torch.addcmul(s, s, s, value=-1)
        return torch.addcmul(s, slope, sigmoid_slope, out=slope).mul_(grad).to(x.dtype)


def _to_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


class _Rotation(torch.autograd.Function):
    """The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = cos.shape[-1]
    x1, x2 = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    first, second = out[..., :half], out[..., half:]
    torch.mul(x1, cos, out=first).addcmul_(x2, sin, value=-direction)
    torch.mul(x2, cos, out=second).addcmul_(x1, sin, value=direction)
    return out
