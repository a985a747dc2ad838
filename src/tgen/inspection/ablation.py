"""Ablation: the loss of a model without single heads (Michel et al. 2019), or without groups of
heads and layers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tgen.config import ModelConfig
from tgen.config.index_ranges import parse_indices
from tgen.errors import UsageError
from tgen.inspection.hooks import (
    hook_part,
    hooks_removed,
    model_blocks,
    record_residuals,
    token_batch,
    token_losses,
)
from tgen.inspection.predictions import top_predictions
from tgen.model.transformer import Transformer
from tgen.reports.inspection import AblationReport, GroupAblation
from tgen.tokenizer import Tokenizer

AblationKind = Literal["zero", "mean"]
Component = tuple[str, int, int | None]  # part, layer, head
_LAYER_PARTS = ("attention", "feed_forward")
_MEMBER = re.compile(rf"(all|[\d-]+)(?:\.(all|[\d-]+|{'|'.join(_LAYER_PARTS)}))?")


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
    _require_tokens(ids)
    vectors, contexts = record_residuals(model, ids)
    loss = float(token_losses(model, model.final_norm(vectors[-1]), ids).mean())
    costs: list[list[float]] = []
    blocks = model_blocks(model)
    n_layers, n_heads = model.config.n_layers, model.config.n_heads
    for layer in range(n_layers):
        costs.append([])
        for head in range(n_heads):

            def ablate(outputs: Tensor, head: int = head) -> Tensor:
                mean = outputs.mean(dim=1, keepdim=True)
                values = torch.zeros_like(mean) if kind == "zero" else mean
                return _replaced(outputs, head, values)

            x = vectors[layer]
            with hooks_removed(hook_part(model, "heads", layer, ablate)):
                for block, context in zip(blocks[layer:], contexts[layer:], strict=True):
                    x = block(x, context)
            costs[-1].append(float(token_losses(model, model.final_norm(x), ids).mean()) - loss)
            progress((layer * n_heads + head + 1) / (n_layers * n_heads))
    return Ablation(loss=loss, costs=costs)


def parse_groups(spec: str | None, config: ModelConfig) -> dict[str, list[Component]]:
    """Parse groups such as `0.1+0.3,2.attention,3`, by default each layer's attention and
    feed-forward; raises UsageError for others.

    A layer is both of these parts.
    """
    if spec is None:
        spec = ",".join(f"{i}.{part}" for i in range(config.n_layers) for part in _LAYER_PARTS)
    groups: dict[str, list[Component]] = {}
    for group in (group.strip() for group in spec.split(",")):
        components = groups.setdefault(group, [])
        for member in group.split("+"):
            match = _MEMBER.fullmatch(member.strip())
            if match is None:
                raise UsageError(
                    f"--group: not layers or heads (got {member!r})",
                    "use layers (2), heads (2.0-3), 2.attention or 2.feed_forward; + joins them",
                )
            layers, part = parse_indices("--group", match[1], config.n_layers), match[2]
            if part is None or part in _LAYER_PARTS:
                parts = _LAYER_PARTS if part is None else (part,)
                components += [(name, layer, None) for layer in layers for name in parts]
            else:
                heads = parse_indices("--group", part, config.n_heads)
                components += [("heads", layer, head) for layer in layers for head in heads]
    return groups


@torch.no_grad()
def ablate_groups(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    groups: Mapping[str, Sequence[Component]],
    kind: AblationKind,
    *,
    top: int,
    progress: Callable[[float], None] = lambda _: None,
) -> AblationReport:
    """Run the text once per group, whose outputs are replaced with 0 or with their means over the
    text in the complete model. Raises UsageError for a text of one token."""
    _require_tokens(ids)
    means: dict[tuple[str, int], Tensor] = {}

    def run() -> tuple[float, Tensor]:
        """Return the loss and the logits (V,) of the next token."""
        x = model.hidden_states(token_batch(model, [ids]))
        return float(token_losses(model, x, ids).mean()), model.logits(x[0, -1]).float()

    def keep_mean(part: str, layer: int) -> RemovableHandle:
        def keep(outputs: Tensor) -> None:
            means[part, layer] = outputs.mean(dim=1, keepdim=True)

        return hook_part(model, part, layer, keep)

    def ablate(part: str, layer: int, head: int | None) -> RemovableHandle:
        mean = means[part, layer]
        values = torch.zeros_like(mean) if kind == "zero" else mean
        return hook_part(model, part, layer, lambda outputs: _replaced(outputs, head, values))

    parts = ("heads", *_LAYER_PARTS)
    layers = range(model.config.n_layers)
    with hooks_removed(*(keep_mean(part, layer) for part in parts for layer in layers)):
        loss, complete = run()
    reports = []
    for i, (name, components) in enumerate(groups.items()):
        with hooks_removed(*(ablate(*component) for component in components)):
            group_loss, logits = run()
        log_p, log_q = complete.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        reports.append(
            GroupAblation(
                group=name,
                loss=group_loss,
                cost=group_loss - loss,
                divergence=float((log_p.exp() * (log_p - log_q)).sum()),
                predictions=top_predictions(logits, tokenizer, top),
            )
        )
        progress((i + 1) / len(groups))
    return AblationReport(
        kind=kind, loss=loss, predictions=top_predictions(complete, tokenizer, top), groups=reports
    )


def _replaced(outputs: Tensor, head: int | None, values: Tensor) -> Tensor:
    """Return a part's outputs (1, T, ...), those of one head or all, with values (1, 1, ...) at
    every position."""
    where = slice(None) if head is None else head
    outputs = outputs.clone()
    outputs[:, :, where] = values[:, :, where]
    return outputs


def _require_tokens(ids: Sequence[int]) -> None:
    if len(ids) < 2:
        raise UsageError("ablation needs a text of at least 2 tokens", "pass a longer text")
