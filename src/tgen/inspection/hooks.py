"""What passes through a model's blocks, caught by hooks, so that the model need not know of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tgen.errors import UsageError
from tgen.inspection.attention import batch_of
from tgen.model.transformer import Block, ForwardContext, Transformer

_POSITIONS = 128  # scored at a time: a vocabulary is wide


def blocks_of(model: Transformer) -> list[Block]:
    """Its blocks, as what they are."""
    return [block for block in model.blocks if isinstance(block, Block)]


@contextmanager
def hooked(*hooks: Any) -> Iterator[None]:
    """Takes the hooks away again."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def residuals(model: Transformer, ids: Sequence[int]) -> tuple[list[Tensor], ForwardContext]:
    """The vectors (1, T, C) that enter the first block and leave each, and what goes with them."""
    vectors: list[Tensor] = []
    carried: list[ForwardContext] = []

    def enter(_: nn.Module, arguments: tuple[Tensor, ForwardContext]) -> None:
        vectors.append(arguments[0])
        carried.append(arguments[1])

    def leave(_: nn.Module, __: Any, out: Tensor) -> None:
        vectors.append(out)

    first = blocks_of(model)[0].register_forward_pre_hook(enter)
    with hooked(first, *(block.register_forward_hook(leave) for block in blocks_of(model))):
        model.hidden(batch_of(model, [ids]))
    return vectors, carried[0]


def logits_in_parts(model: Transformer, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(T, C) last vectors -> the positions of each part and their float32 logits (n, V)."""
    for i in range(0, len(x), _POSITIONS):
        part = slice(i, i + _POSITIONS)
        yield part, model.logits(x[part]).float()


@torch.no_grad()
def losses(model: Transformer, x: Tensor, ids: Sequence[int]) -> Tensor:
    """(1, T, C) last vectors -> (T - 1,) nats of every token but the first."""
    targets = batch_of(model, [ids[1:]])[0]
    parts = [
        nn.functional.cross_entropy(logits, targets[part], reduction="none")
        for part, logits in logits_in_parts(model, x[0, :-1])
    ]
    return torch.cat(parts) if parts else torch.zeros(0)


def require_residual_stream(model: Transformer, what: str) -> None:
    """Raises UsageError where norms stand after the addition: no sum goes through all layers."""
    if model.config.post_norm:
        raise UsageError(
            f"{what} needs vectors that are only added to, layer after layer; this model "
            f"({model.config.family}) norms them after each addition",
            "look at --view predict, attention or rollout; gpt2, llama and qwen3 models have both",
        )
