"""A model's input, and forward hooks for its residual stream; the model has no code for them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tgen.model.transformer import Block, ForwardContext, Transformer

_POSITION_CHUNK = 128  # positions at a time: logits of a large vocabulary take memory


def token_batch(model: Transformer, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return token ids of sequences of equal length as (B, T) int64 on the model's device."""
    device = model.token_embedding.weight.device
    return torch.tensor([list(sequence) for sequence in sequences], device=device)


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


def hook_part(
    model: Transformer, part: str, layer: int, edit: Callable[[Tensor], Tensor | None]
) -> RemovableHandle:
    """Call `edit` with a part of a layer in every pass; what it returns, unless None, replaces it.

    Parts: `residual`, the stream (B, T, C) before the layer, or after the last one; `attention` and
    `feed_forward`, the outputs (B, T, C) after their norm, without `residual_scale`; `heads`
    (B, T, H, D) before the output projection.
    """
    blocks, n_heads = model_blocks(model), model.config.n_heads

    def edit_input(_: nn.Module, arguments: tuple[Tensor, ...]) -> Any:
        x = arguments[0]
        new = edit(x.reshape(*x.shape[:2], n_heads, -1) if part == "heads" else x)
        return None if new is None else (new.flatten(2), *arguments[1:])

    if part == "residual":
        module = blocks[layer] if layer < len(blocks) else model.final_norm
        return module.register_forward_pre_hook(edit_input)
    block = blocks[layer]
    if part == "heads":
        return block.attention.o_proj.register_forward_pre_hook(edit_input)
    name = f"{part}_output_norm" if block.normalizes_outputs else part
    output: nn.Module = getattr(block, name)
    return output.register_forward_hook(lambda _, __, out: edit(out))


def parts_recorded(
    model: Transformer,
    sites: Iterable[tuple[str, int]],
    store: Callable[[str, int, Tensor], None],
) -> AbstractContextManager[None]:
    """Call `store` in every pass with the part, the layer and the values of each site, until the
    context ends; see `hook_part` for parts and shapes."""
    return hooks_removed(*(hook_part(model, *site, partial(store, *site)) for site in sites))


@torch.no_grad()
def record_residuals(
    model: Transformer, ids: Sequence[int]
) -> tuple[list[Tensor], list[ForwardContext]]:
    """Return the residual stream (1, T, C) before the first block and after each, and the context
    that each block receives."""
    vectors: list[Tensor] = []
    contexts: list[ForwardContext] = []

    def before(_: nn.Module, arguments: tuple[Tensor, ForwardContext]) -> None:
        vectors.append(arguments[0])
        contexts.append(arguments[1])

    hooks = [block.register_forward_pre_hook(before) for block in model_blocks(model)]
    last = hook_part(model, "residual", model.config.n_layers, vectors.append)
    with hooks_removed(*hooks, last):
        model.hidden_states(token_batch(model, [ids]))
    return vectors, contexts


def run_blocks(
    model: Transformer, x: Tensor, contexts: Sequence[ForwardContext], first: int
) -> Tensor:
    """Run the layers from `first` on: its input (B, T, C) -> the last layer's output."""
    for block, context in zip(model_blocks(model)[first:], contexts[first:], strict=True):
        x = block(x, context)
    return x


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
