"""Activation checkpointing: blocks that are computed again in the backward pass, with the same
dropout masks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tgen.model.dropout import Dropout

# Functions that return and set the state of a random number generator.
_State = tuple[Callable[[], Tensor], Callable[[Tensor], object]]


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
