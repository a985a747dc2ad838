"""Dropout whose masks depend on the sequence only, not on the batch around it."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Module):
    """In training, zero each number with probability `p` and scale the others by 1 / (1 - p).

    `generators`, if set, make the masks of one sequence each, on the CPU: the same for any batch
    size, micro-batch or number of ranks. Without them, masks come from torch's own generator.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generators: Sequence[torch.Generator] | None = None  # one per sequence of a batch

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...)."""
        if not self.training or self.p == 0:
            return x
        if self.generators is None:  # one kernel for the whole batch
            return F.dropout(x, self.p)
        # A 64-bit random number gives four of 16 bits; torch's bernoulli_ takes 7 times as long.
        n_dropped = min(round(self.p * (1 << 16)), (1 << 16) - 1)  # of 65,536
        bits = torch.empty(len(x), math.ceil(x[0].numel() / 4), dtype=torch.int64)
        for sequence_bits, generator in zip(bits, self.generators, strict=True):
            sequence_bits.random_(-(1 << 63), None, generator=generator)
        lanes = bits.view(torch.int16)[:, : x[0].numel()].view(x.shape)
        mask = torch.ge(lanes, n_dropped - (1 << 15), out=torch.empty_like(x))
        return x * mask.div_(1 - n_dropped / (1 << 16))
