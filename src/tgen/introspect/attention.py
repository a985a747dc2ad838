"""The attention weights that the model really uses, from what its forward pass hands over."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tgen.errors import UsageError
from tgen.model.transformer import Transformer
from tgen.reports import AttentionReport


class AttentionRecorder:
    """Handed to `Transformer.forward`: keeps the weights (B, H, T, S) of the layers asked for.

    softmax(q k^T / sqrt(D)) over the keys up to each query's position, queries grouped over fewer
    key heads, from the very q and k that the fused kernel gets.
    """

    def __init__(self, layers: Collection[int]) -> None:
        self._layers = layers
        self.weights: dict[int, Tensor] = {}

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor) -> None:
        """Computes and keeps one layer's weights; v and mixed are for checks elsewhere."""
        del v, mixed
        if layer not in self._layers:
            return
        T, S = q.shape[2], k.shape[2]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, H, T, S)
        future = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1 + S - T)
        self.weights[layer] = scores.masked_fill(future, float("-inf")).softmax(dim=-1)


@torch.no_grad()
def head_attention(
    model: Transformer, ids: Sequence[int], *, layer: int = -1, head: int = 0
) -> AttentionReport:
    """One head's weights over a text of up to context_length tokens; negative numbers count from
    the last. Raises UsageError for a layer or head that is not there or a text that is too long."""
    config = model.config
    check_length(len(ids), config.context_length)
    layer = _index("layer", layer, config.n_layers)
    head = _index("head", head, config.n_heads)
    recorder = AttentionRecorder([layer])
    model(_batch(model, ids), recorder=recorder)
    matrix = recorder.weights[layer][0, head]
    rows = [matrix[i, : i + 1].tolist() for i in range(len(ids))]
    return AttentionReport(layer=layer, head=head, weights=rows)


def check_length(n_tokens: int, context_length: int) -> None:
    """Raises UsageError unless a text fits the context and is not empty."""
    if n_tokens == 0:
        raise UsageError("the prompt is empty", "give at least one character")
    if n_tokens > context_length:
        raise UsageError(
            f"the prompt has {n_tokens} tokens, the model's context {context_length}",
            "inspect a shorter text",
        )


def _batch(model: Transformer, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=model.token_embedding.weight.device)


def _index(what: str, i: int, n: int) -> int:
    if not -n <= i < n:
        raise UsageError(
            f"{what} is {i}, but the model has {n}: 0 to {n - 1}",
            f"choose --{what} from {-n} to {n - 1}; negative ones count from the last",
        )
    return i % n
