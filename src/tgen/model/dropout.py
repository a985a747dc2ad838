"""Dropout whose masks hang on the row, and on nothing else that is computed with it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Module):
    """In training, each number is 0 with probability `p`, or 1 / (1 - p) times itself.

    On a processor the masks of each row come from a generator of its own, where `generators` are
    given: they are the same then, however many rows, parts or ranks a batch is computed in.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generators: Sequence[torch.Generator] | None = None  # one a row of the next pass

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...)."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or self.generators is None:  # on a GPU each call is a kernel
            return F.dropout(x, self.p)
        mask = torch.empty_like(x)
        for row, generator in zip(mask, self.generators, strict=True):
            row.bernoulli_(1 - self.p, generator=generator)
        return x * mask.div_(1 - self.p)
