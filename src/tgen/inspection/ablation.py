"""Head ablation: the loss increase without each head (Michel et al. 2019)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tgen.errors import UsageError
from tgen.inspection.hooks import hooks_removed, model_blocks, record_residuals, token_losses
from tgen.model.transformer import Transformer

AblationKind = Literal["zero", "mean"]


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Losses in nats per token."""

    loss: float  # loss of the complete model
    costs: list[list[float]]  # loss increase by layer and head


@torch.no_grad()
def ablate_heads(
    model: Transformer,
    ids: Sequence[int],
    kind: AblationKind,
    *,
    progress: Callable[[float], None] = lambda _: None,
) -> Ablation:
    """Run the text once per head, whose output is replaced with 0 or with its mean over the text.

    Layers below the head are not recomputed. Raises UsageError for a text of one token.
    """
    if len(ids) < 2:
        raise UsageError("--ablate needs a text of at least 2 tokens", "pass a longer text")
    vectors, contexts = record_residuals(model, ids)
    loss = float(token_losses(model, model.final_norm(vectors[-1]), ids).mean())
    costs: list[list[float]] = []
    blocks = model_blocks(model)
    n_layers, n_heads, D = model.config.n_layers, model.config.n_heads, model.config.head_dim
    for layer in range(n_layers):
        costs.append([])
        for head in range(n_heads):
            columns = slice(head * D, (head + 1) * D)

            def ablate(_: nn.Module, arguments: tuple[Tensor], columns: slice = columns) -> Any:
                outputs = arguments[0].clone()  # (1, T, H D)
                mean = outputs[..., columns].mean(dim=1, keepdim=True)
                outputs[..., columns] = 0 if kind == "zero" else mean
                return (outputs,)

            x = vectors[layer]
            with hooks_removed(blocks[layer].attention.o_proj.register_forward_pre_hook(ablate)):
                for block, context in zip(blocks[layer:], contexts[layer:], strict=True):
                    x = block(x, context)
            costs[-1].append(float(token_losses(model, model.final_norm(x), ids).mean()) - loss)
            progress((layer * n_heads + head + 1) / (n_layers * n_heads))
    return Ablation(loss=loss, costs=costs)
