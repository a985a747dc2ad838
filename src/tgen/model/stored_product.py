"""Products of float32 vectors with a matrix that is float32, bfloat16 or float16."""

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 32  # with fewer, widening the matrix takes longer than the product


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
    return F.linear(x, weight.to(x.dtype), bias)
