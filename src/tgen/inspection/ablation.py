"""Ablation: the loss of a model without single heads (Michel et al. 2019), or without groups of
heads and layers."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
    parts_recorded,
    record_residuals,
    run_blocks,
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


def ablate_heads(
    model: Transformer,
    ids: Sequence[int],
    kind: AblationKind,
    *,
    progress: Callable[[float], None] = lambda _: None,
) -> Ablation:
    """Run the text once per head, whose output is replaced with 0 or with its mean over the text.

    Raises UsageError for a text of one token.
    """
    n_layers, n_heads = model.config.n_layers, model.config.n_heads
    heads = [[("heads", layer, head)] for layer in range(n_layers) for head in range(n_heads)]
    loss, *losses = (loss for loss, _ in _run_without(model, ids, heads, kind, progress))
    costs = [ablated - loss for ablated in losses]
    starts = range(0, len(costs), n_heads)
    return Ablation(loss=loss, costs=[costs[start : start + n_heads] for start in starts])


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
    runs = _run_without(model, ids, [*groups.values()], kind, progress)
    loss, complete = next(runs)
    log_p = complete.log_softmax(dim=-1)
    reports = [
        GroupAblation(
            group=name,
            loss=ablated,
            cost=ablated - loss,
            divergence=float((log_p.exp() * (log_p - logits.log_softmax(dim=-1))).sum()),
            predictions=top_predictions(logits, tokenizer, top),
        )
        for name, (ablated, logits) in zip(groups, runs, strict=True)
    ]
    predictions = top_predictions(complete, tokenizer, top)
    return AblationReport(kind=kind, loss=loss, predictions=predictions, groups=reports)


def _run_without(
    model: Transformer,
    ids: Sequence[int],
    groups: Sequence[Sequence[Component]],
    kind: AblationKind,
    progress: Callable[[float], None],
) -> Iterator[tuple[float, Tensor]]:
    """Yield the loss and the next token's logits (V,) of the complete model and without each group.

    Layers below a group are not recomputed.
    """
    if len(ids) < 2:
        raise UsageError("ablation needs a text of at least 2 tokens", "pass a longer text")
    means: dict[tuple[str, int], Tensor] = {}

    def keep_mean(part: str, layer: int, outputs: Tensor) -> None:
        means[part, layer] = outputs.mean(dim=1, keepdim=True)

    def ablate(part: str, layer: int, head: int | None) -> RemovableHandle:
        mean, where = means[part, layer], slice(None) if head is None else head
        values = torch.zeros_like(mean) if kind == "zero" else mean

        def replace(outputs: Tensor) -> Tensor:  # (1, T, ...)
            outputs = outputs.clone()
            outputs[:, :, where] = values[:, :, where]
            return outputs

        return hook_part(model, part, layer, replace)

    def finish(x: Tensor) -> tuple[float, Tensor]:
        x = model.final_norm(x)
        return float(token_losses(model, x, ids).mean()), model.logits(x[0, -1]).float()

    sites = product(("heads", *_LAYER_PARTS), range(model.config.n_layers))
    with torch.no_grad(), parts_recorded(model, sites, keep_mean):
        vectors, contexts = record_residuals(model, ids)
        complete = finish(vectors[-1])
    yield complete
    for i, group in enumerate(groups):
        first = min(layer for _, layer, _ in group)
        with torch.no_grad(), hooks_removed(*(ablate(*component) for component in group)):
            ablated = finish(run_blocks(model, vectors[first], contexts, first))
        progress((i + 1) / len(groups))
        yield ablated
