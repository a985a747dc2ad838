"""Activation checkpointing: blocks are computed again in the backward pass, to save memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tgen.model.dropout import Dropout


def checkpoint_block(
    block: Callable[..., Any], x: Tensor, context: Any, dropout: Dropout
) -> Tensor:
    """Return block(x, context), storing only x; the second pass repeats the masks of the first.

    The masks come from the generators of `dropout`, or from torch's own without them.
    """
    from torch.utils.checkpoint import checkpoint  # takes a tenth of a second to import

    masked = dropout.training and dropout.p > 0
    out: Tensor = checkpoint(
        block,
        x,
        context,
        use_reentrant=False,
        preserve_rng_state=masked and dropout.generators is None,
        context_fn=lambda: (nullcontext(), _repeat_masks(dropout)),
        determinism_check="none",
    )
    return out


def _repeat_masks(dropout: Dropout) -> AbstractContextManager[None]:
    """Return a context in which the generators continue from their present states."""
    generators = list(dropout.generators or ()) if dropout.training and dropout.p > 0 else []
    return _set_states(generators, [generator.get_state() for generator in generators])


@contextmanager
def _set_states(generators: list[torch.Generator], states: list[Tensor]) -> Iterator[None]:
    now = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in zip(generators, now, strict=True):
            generator.set_state(state)
