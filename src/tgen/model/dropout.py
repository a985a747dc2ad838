"""Dropout whose masks depend on the sequence only, not on the batch around it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Module):
    """In training, zero each number with probability `p` and scale the others by 1 / (1 - p).

    On the CPU, `generators`, if set, make the masks of one sequence each: the same for any batch
    size, micro-batch or number of ranks.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generators: Sequence[torch.Generator] | None = None  # one per sequence of a batch

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...)."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or self.generators is None:  # one GPU kernel for the whole batch
            return F.dropout(x, self.p)
        mask = torch.empty_like(x)
        for sequence_mask, generator in zip(mask, self.generators, strict=True):
            sequence_mask.bernoulli_(1 - self.p, generator=generator)
        return x * mask.div_(1 - self.p)
