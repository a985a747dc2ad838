"""Forward hooks that record a model's residual stream; the model has no code for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tgen.errors import UsageError
from tgen.inspection.attention import token_batch
from tgen.model.transformer import Block, ForwardContext, Transformer

_POSITION_CHUNK = 128  # positions at a time: logits of a large vocabulary take memory


def model_blocks(model: Transformer) -> list[Block]:
    """Return the model's blocks, typed."""
    return [block for block in model.blocks if isinstance(block, Block)]


@contextmanager
def hooks_removed(*hooks: Any) -> Iterator[None]:
    """Remove the hooks on exit."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def record_residuals(model: Transformer, ids: Sequence[int]) -> tuple[list[Tensor], ForwardContext]:
    """Return the residual stream (1, T, C) before the first block and after each, and the context
    that the blocks receive."""
    vectors: list[Tensor] = []
    contexts: list[ForwardContext] = []

    def before(_: nn.Module, arguments: tuple[Tensor, ForwardContext]) -> None:
        vectors.append(arguments[0])
        contexts.append(arguments[1])

    def after(_: nn.Module, __: Any, out: Tensor) -> None:
        vectors.append(out)

    blocks = model_blocks(model)
    first = blocks[0].register_forward_pre_hook(before)
    with hooks_removed(first, *(block.register_forward_hook(after) for block in blocks)):
        model.hidden_states(token_batch(model, [ids]))
    return vectors, contexts[0]


def iterate_logits(model: Transformer, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of positions with their float32 logits (n, V); x: (T, C) final vectors."""
    for i in range(0, len(x), _POSITION_CHUNK):
        chunk = slice(i, i + _POSITION_CHUNK)
        yield chunk, model.logits(x[chunk]).float()


@torch.no_grad()
def token_losses(model: Transformer, x: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the loss of every token but the first: (1, T, C) final vectors -> (T - 1,) nats."""
    targets = token_batch(model, [ids[1:]])[0]
    chunks = [
        nn.functional.cross_entropy(logits, targets[chunk], reduction="none")
        for chunk, logits in iterate_logits(model, x[0, :-1])
    ]
    return torch.cat(chunks) if chunks else torch.zeros(0)


def require_residual_stream(model: Transformer, what: str) -> None:
    """Raise UsageError for a post-norm model: no sum runs through all its layers."""
    if model.config.post_norm:
        raise UsageError(
            f"{what} needs a pre-norm model; {model.config.family} normalizes after each residual "
            "addition (post-norm)",
            "use --view predict, attention or rollout, or a model of the family gpt2 or llama",
        )
