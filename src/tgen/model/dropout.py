"""Dropout whose masks depend on the sequence only, not on the batch around it, and blocks that are
computed again in the backward pass, with the same masks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Functions that return and set the state of a random number generator.
_State = tuple[Callable[[], Tensor], Callable[[Tensor], object]]


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


def checkpoint_block(
    block: Callable[..., Any], x: Tensor, context: Any, dropout: Dropout
) -> Tensor:
    """Return block(x, context), storing only x; the second pass repeats the masks of the first.

    The masks come from the generators of `dropout`, or from torch's own without them.
    """
    from torch.utils.checkpoint import checkpoint  # takes a tenth of a second to import

    masked = dropout.training and dropout.p > 0
    how: dict[str, Any] = {"use_reentrant": False, "determinism_check": "none"}
    if masked and (states := _random_states(dropout, x.device)):  # contexts cannot be compiled
        how["context_fn"] = lambda: (nullcontext(), _repeat(states))
    out: Tensor = checkpoint(
        block, x, context, preserve_rng_state=masked and dropout.generators is None, **how
    )
    return out


def _random_states(dropout: Dropout, device: torch.device) -> list[_State]:
    """Return the states behind the masks, unless torch's checkpoint repeats them itself."""
    if dropout.generators is not None:
        return [(one.get_state, one.set_state) for one in dropout.generators]
    if device.type == "mps" and not torch.compiler.is_compiling():
        return [(torch.mps.get_rng_state, torch.mps.set_rng_state)]
    return []


def _repeat(states: list[_State]) -> AbstractContextManager[None]:
    """Return a context in which the random numbers continue from the present states."""
    return _set_states(states, [get_state() for get_state, _ in states])


@contextmanager
def _set_states(states: list[_State], values: list[Tensor]) -> Iterator[None]:
    now = [get_state() for get_state, _ in states]
    for (_, set_state), value in zip(states, values, strict=True):
        set_state(value)
    try:
        yield
    finally:
        for (_, set_state), value in zip(states, now, strict=True):
            set_state(value)
