"""The attention kernels of torch that generation uses on a CUDA GPU; measured on an H200.

cuDNN's is the fastest for bfloat16, but plans for some 60 ms whenever the number of keys is new:
only a step of fixed shapes repays that. One query of float32 is computed 2 to 11 times as fast by
plain products as by the memory-efficient kernel, and as fast with grouped queries.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def use_pass_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Return the context of a pass whose shape may not come again."""
    return _on_cuda(device, [*_FUSED, SDPBackend.MATH])


def use_step_kernels(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return the context of a step of fixed shapes whose keys and values have this dtype."""
    fused = [] if dtype == torch.float32 else [SDPBackend.CUDNN_ATTENTION, *_FUSED]
    return _on_cuda(device, [*fused, SDPBackend.MATH])


def _on_cuda(device: torch.device, kernels: list[SDPBackend]) -> AbstractContextManager[None]:
    return sdpa_kernel(kernels) if device.type == "cuda" else nullcontext()
