"""Products of float32 matrices from rounded inputs, with float32 sums: bfloat16 on a CPU, TF32 on
CUDA, where autocast rounds most of them to bfloat16 before.

CPUs with AMX or AVX512_BF16 compute them faster. The setting is global in torch. On a CPU it also
reaches the small products inside the fused attention, which it makes slower: attention is excluded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tgen.config import Precision

_MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
_NAMES: dict[Precision, str] = {"float32": "ieee", "bfloat16": "bf16"}


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
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # not in all versions
    return device.type == "cpu" and any(getattr(torch.cpu, n, lambda: False)() for n in names)


def has_bfloat16_units(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this CUDA capability computes bfloat16; older ones emulate it slowly."""
    return capability >= (8, 0)


def products_are_bfloat16() -> bool:
    """Whether products have the precision bfloat16 now."""
    return bool(_MATMUL.fp32_precision == _NAMES["bfloat16"])


def in_full_precision(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return attention(q, k, v), on a CPU computed in float32 whatever the precision of other
    products, and so are its gradients."""
    if q.device.type != "cpu" or not products_are_bfloat16():
        return attention(q, k, v)
    full, reduced = _NAMES["float32"], _NAMES["bfloat16"]
    out = attention(*_Switch.apply(full, reduced, q, k, v))  # type: ignore[no-untyped-call]
    (result,) = _Switch.apply(reduced, full, out)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


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


def _set(name: str) -> None:
    _MATMUL.fp32_precision = name
