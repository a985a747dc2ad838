"""The model's actual attention weights, recorded during its forward pass."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from tgen.inspection.hooks import model_blocks, token_batch
from tgen.model.transformer import RMSNorm, Transformer
from tgen.reports.inspection import AttentionReport, RolloutReport

Measure = Literal["attention", "value"]
LayerHead = tuple[int, int | None]  # None: the mean over the layer's heads
# layer, first query, attention weights (B, H, n, S) of n queries over the keys up to the last query
OnWeights = Callable[[int, int, Tensor], None]

_QUERY_CHUNK = 128  # queries at a time: bounds the memory of long texts


class AttentionRecorder:
    """A recorder for `Transformer.forward`: computes attention weights per layer.

    softmax(scale q k^T) over the visible keys, in float32, from the same q and k that the fused
    kernel receives. `kernel_error` is the largest difference between these weights times the values
    and the kernel's output, relative to the output's largest number where that exceeds 1.
    """

    def __init__(
        self,
        on_weights: OnWeights,
        *,
        scale: float,
        layers: Collection[int] | None = None,
        value_norms: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        """Record `layers`, all by default; `scale` is the config's `score_scale`.

        With `value_norms` (layer, values -> (B, H, S)), `on_weights` receives the weights times
        their keys' norms, each row normalized to sum to 1.
        """
        self._on_weights, self._layers, self._value_norms = on_weights, layers, value_norms
        self._scale = scale
        self.kernel_error = 0.0
        self.row_sum_error = 0.0  # the largest distance of a row's sum from 1

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_out: Tensor
    ) -> None:
        """Compute one layer's weights, a chunk of queries at a time."""
        if self._layers is not None and layer not in self._layers:
            return
        T, S, group_size = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group_size, dim=1).float() for x in (k, v))  # (B, H, S, D)
        norms = None if self._value_norms is None else self._value_norms(layer, v)
        for first in range(0, T, _QUERY_CHUNK):
            queries = q[:, :, first : first + _QUERY_CHUNK].float()  # (B, H, n, D)
            n = queries.shape[2]
            n_keys = S - T + first + n  # visible to the last of these queries
            scores = queries @ k[:, :, :n_keys].transpose(-1, -2) * self._scale
            masked = torch.ones(n, n_keys, dtype=torch.bool, device=q.device).triu(1 + n_keys - n)
            if mask is not None:
                masked |= ~mask[first : first + n, :n_keys]
            weights = scores.masked_fill_(masked, float("-inf")).softmax(dim=-1)
            ours = weights @ v[:, :, :n_keys]
            kernel = attn_out[:, :, first : first + n]
            error = (ours - kernel).abs().max() / kernel.abs().max().clamp_min(1)
            self.kernel_error = larger_error(self.kernel_error, float(error))
            row_sum_error = float((weights.sum(dim=-1) - 1).abs().max())
            self.row_sum_error = larger_error(self.row_sum_error, row_sum_error)
            if norms is not None:
                weights *= norms[:, :, None, :n_keys]
                weights /= weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
            self._on_weights(layer, first, weights)
            del scores, weights, ours  # before the next chunk: two would take twice the memory


def larger_error(a: float, b: float) -> float:
    """Return the larger of two errors; NaN is the largest."""
    return a if math.isnan(a) or b <= a else b


class MatrixCollector:
    """A collector of the matrices (T, T) of the selected heads, for a batch of one text."""

    def __init__(self, selected: Collection[LayerHead], n_tokens: int) -> None:
        self.matrices = {key: torch.zeros(n_tokens, n_tokens) for key in selected}

    def __call__(self, layer: int, first: int, weights: Tensor) -> None:
        """Store one chunk of queries."""
        n, n_keys = weights.shape[-2:]
        for (wanted, head), matrix in self.matrices.items():
            if wanted == layer:
                chunk = weights[0].mean(dim=0) if head is None else weights[0, head]
                matrix[first : first + n, :n_keys] = chunk.cpu()


@torch.no_grad()
def record_attention(
    model: Transformer,
    ids: Sequence[int],
    selected: Sequence[LayerHead],
    *,
    measure: Measure = "attention",
) -> tuple[list[AttentionReport], AttentionRecorder]:
    """Return the attention weights of the selected heads, and the recorder with their errors.

    With the measure "value", a weight is its key's share of the head's output, ||A_ij v_j W_O||
    (Kobayashi et al. 2020): attention to tokens with short values vanishes. A norm of the output
    is part of W_O.
    """
    collector = MatrixCollector(selected, len(ids))

    def value_norms(layer: int, v: Tensor) -> Tensor:
        """||v_j W_O|| per head: (B, H, S, D) -> (B, H, S)."""
        block = model_blocks(model)[layer]
        W_O = block.attention.o_proj.weight  # (C, H D)
        norm = getattr(block, "attention_output_norm", None)
        if isinstance(norm, RMSNorm):  # its division affects all keys of a query alike
            W_O = norm.scale[:, None] * W_O
        per_head = torch.split(W_O, v.shape[3], dim=1)  # H of (C, D)
        return torch.stack(
            [(v[:, h] @ W.float().T).norm(dim=-1) for h, W in enumerate(per_head)], dim=1
        )

    recorder = AttentionRecorder(
        collector,
        scale=model.config.score_scale,
        layers={layer for layer, _ in selected},
        value_norms=value_norms if measure == "value" else None,
    )
    model.hidden_states(token_batch(model, [ids]), recorder=recorder)
    group_size = model.config.n_heads // model.config.n_kv_heads
    reports = [
        AttentionReport(
            layer=layer,
            head=head,
            kv_head=None if head is None else head // group_size,
            weights=collector.matrices[layer, head].numpy(),
            window=model.config.window(layer),
            measure=measure,
        )
        for layer, head in selected
    ]
    return reports, recorder


@torch.no_grad()
def attention_rollout(
    model: Transformer, ids: Sequence[int]
) -> tuple[list[RolloutReport], AttentionRecorder]:
    """Return each token's share in each position, per layer: R = (mean A + I) / 2 R.

    Half of each layer's mix is the residual connection (Abnar & Zuidema 2020).
    """
    T, n_layers = len(ids), model.config.n_layers
    collector = MatrixCollector([(layer, None) for layer in range(n_layers)], T)
    recorder = AttentionRecorder(collector, scale=model.config.score_scale)
    model.hidden_states(token_batch(model, [ids]), recorder=recorder)
    shares, reports = torch.eye(T), []
    for layer in range(n_layers):
        shares = (collector.matrices[layer, None] + torch.eye(T)) / 2 @ shares
        reports.append(RolloutReport(layer=layer, weights=shares.tril().numpy()))
    return reports, recorder


@torch.no_grad()
def most_focused_head(
    model: Transformer, ids: Sequence[int], layers: Collection[int]
) -> tuple[int, int]:
    """Return the layer and head with the largest weights on a single other token.

    The first token (the attention sink) and the query itself do not count. For texts of fewer than
    3 tokens, it is the first head.
    """
    focus = torch.zeros(model.config.n_layers, model.config.n_heads)

    def add(layer: int, _: int, weights: Tensor) -> None:
        n, n_keys = weights.shape[-2:]
        others = weights[0].tril(n_keys - n - 1)[..., 1:]  # (H, n, n_keys - 1)
        if others.shape[-1]:
            focus[layer] += others.amax(dim=-1).sum(dim=-1).cpu()

    recorder = AttentionRecorder(add, scale=model.config.score_scale, layers=layers)
    model.hidden_states(token_batch(model, [ids]), recorder=recorder)
    candidates = sorted(layers)
    best = int(focus[candidates].argmax())
    return candidates[best // model.config.n_heads], best % model.config.n_heads
