"""Frozen weights: buffers in the dtype of the file, without gradients.

Matrices stay float32, bfloat16 or float16, and are widened to the dtype of their input one at a
time while they are used. Vectors are float32, since norms compute in the dtype of their weight.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tgen.config import ModelConfig
from tgen.model.product_precision import matmul
from tgen.model.stored_product import stored_product
from tgen.model.transformer import Linear, Transformer


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
        tensors = {name: _as_stored(arrays[f"{path}.{name}"]) for name in names}
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


def _as_stored(array: NDArray[Any]) -> Tensor:
    tensor = torch.from_numpy(np.asarray(array))  # quantized ones are dequantized
    if array.dtype == np.uint16:
        tensor = tensor.view(torch.bfloat16)
    return tensor.float() if tensor.ndim == 1 else tensor
