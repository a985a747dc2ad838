"""The attention weights that the model really uses, from what its forward pass hands over."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from tgen.errors import UsageError
from tgen.model.transformer import Transformer
from tgen.reports import AttentionReport, RolloutReport

Measure = Literal["attention", "value"]
# layer, first query, weights (B, H, n, S): those of n queries on all keys up to the last of them
Take = Callable[[int, int, Tensor], None]

_QUERIES = 128  # at a time: bounds the memory of long texts


class AttentionRecorder:
    """Handed to `Transformer.forward`: gives `take` the weights of the layers asked for.

    softmax(q k^T / sqrt(D)) over the keys up to each query's position, queries grouped over fewer
    key heads, in float32, from the very q and k that the fused kernel got. `difference` is the
    largest one between these weights times the values and what that kernel made of them, as a share
    of its largest number where that is above 1.
    """

    def __init__(
        self,
        take: Take,
        *,
        layers: Collection[int] | None = None,
        lengths: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        """All layers, unless some are named. With `lengths`, a function from a layer and its values
        to (B, H, S), `take` gets each weight times its key's length, as shares of the row."""
        self._take, self._layers, self._lengths = take, layers, lengths
        self.difference = 0.0
        self.row_error = 0.0  # the largest distance of a row's sum from 1

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mixed: Tensor
    ) -> None:
        """One layer's weights, some queries at a time."""
        if self._layers is not None and layer not in self._layers:
            return
        T, S, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1).float() for x in (k, v))  # (B, H, S, D)
        lengths = None if self._lengths is None else self._lengths(layer, v)
        for first in range(0, T, _QUERIES):
            queries = q[:, :, first : first + _QUERIES].float()  # (B, H, n, D)
            n = queries.shape[2]
            seen = S - T + first + n  # keys that the last of these queries sees
            scores = queries @ k[:, :, :seen].transpose(-1, -2) * q.shape[-1] ** -0.5
            hidden = torch.ones(n, seen, dtype=torch.bool, device=q.device).triu(1 + seen - n)
            if mask is not None:
                hidden |= ~mask[first : first + n, :seen]
            weights = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
            ours = weights @ v[:, :, :seen]
            theirs = mixed[:, :, first : first + n]
            off = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1)
            self.difference = worse(self.difference, float(off))
            row_error = float((weights.sum(dim=-1) - 1).abs().max())
            self.row_error = worse(self.row_error, row_error)
            if lengths is not None:
                weights *= lengths[:, :, None, :seen]
                weights /= weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
            self._take(layer, first, weights)
            del scores, weights, ours  # before the next: two at a time would be twice the memory


def worse(a: float, b: float) -> float:
    """The larger error; what is not a number is the worst."""
    return a if math.isnan(a) or b <= a else b


class Kept:
    """Keeps whole matrices (T, T) of the heads asked for; None stands for a layer's mean."""

    def __init__(self, wanted: Collection[tuple[int, int | None]], n_tokens: int) -> None:
        self.matrices = {place: torch.zeros(n_tokens, n_tokens) for place in wanted}

    def __call__(self, layer: int, first: int, weights: Tensor) -> None:
        """Takes one row of the batch."""
        n, seen = weights.shape[-2:]
        for (at, head), matrix in self.matrices.items():
            if at == layer:
                one = weights[0].mean(dim=0) if head is None else weights[0, head]
                matrix[first : first + n, :seen] = one.cpu()


@torch.no_grad()
def attention_of(
    model: Transformer,
    ids: Sequence[int],
    places: Sequence[tuple[int, int | None]],
    *,
    measure: Measure = "attention",
    why: str = "",
) -> tuple[list[AttentionReport], AttentionRecorder]:
    """The weights of these layers and heads (None: a layer's mean over its heads), and the recorder
    that knows how exact they are.

    Measured by value, a weight counts as much as its key adds to the layer's output, ||A_ij v_j
    W_O|| as a share of the row: what is parked on tokens of short values vanishes (Kobayashi et al.
    2020).
    """
    kept = Kept(places, len(ids))
    layers = {layer for layer, _ in places}

    def lengths(layer: int, v: Tensor) -> Tensor:
        """||v_j W_O|| of each head's values: how much of them reaches the layer's output."""
        W_O = model.get_parameter(f"blocks.{layer}.attention.o_proj.weight")  # (C, H D)
        heads = torch.split(W_O, v.shape[3], dim=1)  # H of (C, D)
        return torch.stack(
            [(v[:, h] @ W.float().T).norm(dim=-1) for h, W in enumerate(heads)], dim=1
        )

    by_value = lengths if measure == "value" else None
    recorder = AttentionRecorder(kept, layers=layers, lengths=by_value)
    model.hidden(batch_of(model, [ids]), recorder=recorder)
    groups = model.config.n_heads // model.config.n_kv_heads
    reports = [
        AttentionReport(
            layer=layer,
            head=head,
            kv_head=None if head is None else head // groups,
            weights=kept.matrices[layer, head].numpy(),
            measure=measure,
            why=why,
        )
        for layer, head in places
    ]
    return reports, recorder


@torch.no_grad()
def rollout(
    model: Transformer, ids: Sequence[int]
) -> tuple[list[RolloutReport], AttentionRecorder]:
    """Which tokens could have fed each position, layer after layer: R = (mean A + I) / 2 R, where
    half stands for the residual path (Abnar & Zuidema 2020)."""
    T, n_layers = len(ids), model.config.n_layers
    kept = Kept([(layer, None) for layer in range(n_layers)], T)
    recorder = AttentionRecorder(kept)
    model.hidden(batch_of(model, [ids]), recorder=recorder)
    rolled, reports = torch.eye(T), []
    for layer in range(n_layers):
        rolled = (kept.matrices[layer, None] + torch.eye(T)) / 2 @ rolled
        reports.append(RolloutReport(layer=layer, weights=rolled.tril().numpy()))
    return reports, recorder


@torch.no_grad()
def most_focused_head(
    model: Transformer, ids: Sequence[int], layers: Collection[int]
) -> tuple[int, int]:
    """The layer and head that look most at one other token: neither at the first, where heads park
    what they do not need, nor at the query itself. The first head for texts too short to tell."""
    found = torch.zeros(model.config.n_layers, model.config.n_heads)

    def take(layer: int, _: int, weights: Tensor) -> None:
        n, seen = weights.shape[-2:]
        others = weights[0].tril(seen - n - 1)[..., 1:]  # (H, n, seen - 1)
        if others.shape[-1]:
            found[layer] += others.amax(dim=-1).sum(dim=-1).cpu()

    model.hidden(batch_of(model, [ids]), recorder=AttentionRecorder(take, layers=layers))
    chosen = sorted(layers)
    best = int(found[chosen].argmax())
    return chosen[best // model.config.n_heads], best % model.config.n_heads


def check_length(n_tokens: int, context_length: int) -> None:
    """Raises UsageError unless a text fits the context and is not empty."""
    if n_tokens == 0:
        raise UsageError("the prompt is empty", "give at least one character")
    if n_tokens > context_length:
        raise UsageError(
            f"the prompt has {n_tokens:,} tokens, the model's context {context_length:,}",
            "--tail looks at the last of them, or inspect a shorter text",
        )


def batch_of(model: Transformer, rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids of one length -> (B, T) int64 where the model is."""
    return torch.tensor([list(row) for row in rows], device=model.token_embedding.weight.device)
