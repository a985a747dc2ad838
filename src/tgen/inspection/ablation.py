"""What each head is worth: what the text costs more without it (Michel et al. 2019)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tgen.errors import UsageError
from tgen.inspection.hooks import blocks_of, hooked, losses, residuals
from tgen.model.transformer import Transformer

Ablate = Literal["zero", "mean"]


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Nats a token."""

    loss: float  # of the whole model
    cost: list[list[float]]  # by layer and head


@torch.no_grad()
def ablate_heads(
    model: Transformer,
    ids: Sequence[int],
    kind: Ablate,
    *,
    progress: Callable[[float], None] = lambda _: None,
) -> Ablation:
    """Runs the text without each head in turn: its output is 0, or its mean over the text.

    Layers before it are not run again. Raises UsageError for a text of one token.
    """
    if len(ids) < 2:
        raise UsageError("--ablate needs a text of at least 2 tokens", "give a longer text")
    vectors, carried = residuals(model, ids)
    loss = float(losses(model, model.final_norm(vectors[-1]), ids).mean())
    cost: list[list[float]] = []
    blocks = blocks_of(model)
    n_layers, n_heads, D = model.config.n_layers, model.config.n_heads, model.config.head_dim
    for layer in range(n_layers):
        cost.append([])
        for head in range(n_heads):
            slot = slice(head * D, (head + 1) * D)

            def without(_: nn.Module, arguments: tuple[Tensor], slot: slice = slot) -> Any:
                heads = arguments[0].clone()  # (1, T, H D)
                mine = heads[..., slot]
                heads[..., slot] = 0 if kind == "zero" else mine.mean(dim=1, keepdim=True)
                return (heads,)

            x = vectors[layer]
            with hooked(blocks[layer].attention.o_proj.register_forward_pre_hook(without)):
                for block in blocks[layer:]:
                    x = block(x, carried)
            cost[-1].append(float(losses(model, model.final_norm(x), ids).mean()) - loss)
            progress((layer * n_heads + head + 1) / (n_layers * n_heads))
    return Ablation(loss=loss, cost=cost)
