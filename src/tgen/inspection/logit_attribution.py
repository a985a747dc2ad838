"""Direct logit attribution: a logit as the sum of each component's or each token's contribution.

With the final norm's scale held constant, the logit is linear in the residual stream, so every
head, feed-forward layer and embedding has a contribution (Elhage et al. 2021). Likewise, the norm
of a layer's output, where there is one, is linear in the heads at the scale that it has. With the
attention weights held constant too, a head's contribution is the sum of those of the keys: each
token's attention weight times its value. Biases of values, which come from no token, are counted
with the other biases.

A target of several tokens has the sum of their logits; each is predicted at its own position.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tgen.inspection.hooks import hooks_removed, model_blocks, token_batch
from tgen.inspection.token_ablation import leave_one_out, score_target
from tgen.model.transformer import LayerNorm, RMSNorm, Transformer
from tgen.reports.inspection import AttributionReport, Contribution, TokenContribution
from tgen.tokenizer import Tokenizer


class _ComponentRecorder:
    """A recorder of each component's output to the residual stream at n positions, and of their
    attention."""

    def __init__(self, positions: slice, scale: float) -> None:
        self._positions, self._scale = positions, scale
        self.head_outs: list[Tensor] = []  # (n, H D), before the output projection
        self.attn_outs: list[Tensor] = []  # (n, C), before a norm of the output
        self.ffn_outs: list[Tensor] = []  # (n, C), the same
        self.final_residual = torch.zeros(0)  # (n, C), before the final norm
        self.weights: list[Tensor] = []  # attention weights (H, n, S)
        self.values: list[Tensor] = []  # (n_kv_heads, S, D)

    def record_heads(self, _: nn.Module, arguments: tuple[Tensor]) -> None:
        self.head_outs.append(arguments[0][0, self._positions].cpu().double())

    def record_attention(self, _: nn.Module, __: Any, out: Tensor) -> None:
        self.attn_outs.append(out[0, self._positions].cpu().double())

    def record_feed_forward(self, _: nn.Module, __: Any, out: Tensor) -> None:
        self.ffn_outs.append(out[0, self._positions].cpu().double())

    def record_final(self, _: nn.Module, arguments: tuple[Tensor]) -> None:
        self.final_residual = arguments[0][0, self._positions].cpu().double()

    def attention(
        self, _: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, __: Tensor
    ) -> None:
        """Compute the attention weights of the positions in float64."""
        T = q.shape[2]
        queries = q[0, :, self._positions].cpu().double()  # (H, n, D)
        keys = k[0].cpu().double().repeat_interleave(q.shape[1] // k.shape[1], dim=0)  # (H, S, D)
        visible = torch.ones(T, T, dtype=torch.bool).tril() if mask is None else mask.cpu()
        scores = queries @ keys.transpose(-1, -2) * self._scale
        hidden = ~visible[self._positions]
        self.weights.append(scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1))
        self.values.append(v[0].cpu())


@torch.no_grad()
def attribute_logit(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    query: int,
    target: Sequence[int] | None = None,
    left_out: range | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> AttributionReport:
    """Return the contributions to the logit of `target` after position `query`; by default the
    target is the most likely token.

    Each token of `left_out` (None: all up to the query) is left out in a pass of its own. A
    post-norm model, in which no sum runs through all layers, has no other contributions.
    """
    ids = list(ids[: query + 1])
    if target is None:
        target = [int(model.logits(model.hidden_states(token_batch(model, [ids]))[0, -1]).argmax())]
    text = [*ids, *target[:-1]]
    positions = slice(query, len(text))
    recorder = _ComponentRecorder(positions, model.config.score_scale)
    blocks = [] if model.config.post_norm else model_blocks(model)
    with hooks_removed(
        *(b.attention.o_proj.register_forward_pre_hook(recorder.record_heads) for b in blocks),
        *(b.attention.register_forward_hook(recorder.record_attention) for b in blocks),
        *(b.feed_forward.register_forward_hook(recorder.record_feed_forward) for b in blocks),
        model.final_norm.register_forward_pre_hook(recorder.record_final),
    ):
        x = model.hidden_states(token_batch(model, [text]), recorder=recorder if blocks else None)[
            :, positions
        ]
    (logit,), (log_probability,) = score_target(model, x, target)
    parts: list[Contribution] = []
    through_attention, biases = torch.zeros(len(text)).double(), 0.0
    if blocks:
        parts, through_attention, biases = _split(model, recorder, text, target)
    effects = leave_one_out(model, ids, target, left_out, progress)
    tokens = [
        TokenContribution(
            position=i,
            id=text[i],
            text=tokenizer.token_bytes(text[i]),
            logit=part if blocks else None,
            logit_without=effects[i][0] if i in effects else None,
            log_probability_without=effects[i][1] if i in effects else None,
        )
        for i, part in enumerate(through_attention.tolist())
    ]
    feed_forward = sum(part.logit for part in parts if part.component.endswith("feed-forward"))
    embedding = sum(part.logit for part in parts if part.component.endswith("embedding"))
    by_token = embedding + feed_forward + biases + float(through_attention.sum())
    by_component = sum(part.logit for part in parts)
    return AttributionReport(
        query=query,
        targets=list(target),
        target_text=b"".join(map(tokenizer.token_bytes, target)),
        log_probability=log_probability,
        logit=logit,
        contributions=sorted(parts, key=lambda part: -abs(part.logit)),
        tokens=tokens,
        embedding=embedding if blocks else None,
        feed_forward=feed_forward if blocks else None,
        biases=biases if blocks else None,
        difference=max(abs(by_component - logit), abs(by_token - logit)) if blocks else None,
        normalizes_outputs=bool(blocks) and blocks[0].normalizes_outputs,
    )


def _split(
    model: Transformer, recorder: _ComponentRecorder, text: Sequence[int], target: Sequence[int]
) -> tuple[list[Contribution], Tensor, float]:
    """Return the contributions of components, those of tokens through attention (T,), and that of
    all biases."""
    config, first = model.config, len(text) - len(target)
    unembedding = model.output_weight[list(target)].cpu().double()  # (n, C)
    direction, norm_bias = _through_norm(model.final_norm, recorder.final_residual, unembedding)
    parts: list[Contribution] = []
    through_attention, biases = torch.zeros(len(text)).double(), 0.0

    def add(name: str, logit: float, layer: int | None = None, head: int | None = None) -> None:
        parts.append(Contribution(component=name, layer=layer, head=head, logit=logit))

    def project(vectors: Tensor, onto: Tensor = direction) -> float:
        return float((vectors.cpu().double() * onto).sum())

    embeddings = model.token_embedding.weight[list(text[first:])]
    add("token embedding", project(embeddings) * config.embedding_scale)
    if config.position == "learned":
        add("position embedding", project(model.position_embedding.weight[first : len(text)]))
    for layer, block in enumerate(model_blocks(model)):
        attn_out, ffn_out = recorder.attn_outs[layer], recorder.ffn_outs[layer]
        to_attn = to_ffn = direction * block.residual_scale
        if block.normalizes_outputs:
            to_attn, _ = _through_norm(block.attention_output_norm, attn_out, to_attn)
            to_ffn, _ = _through_norm(block.feed_forward_output_norm, ffn_out, to_ffn)
        attention = block.attention
        to_heads = to_attn @ attention.o_proj.weight.cpu().double()  # (n, H D)
        per_dimension = (to_heads * recorder.head_outs[layer]).sum(dim=0)
        for head, values in enumerate(per_dimension.view(config.n_heads, -1)):
            add(f"layer {layer}, head {head}", float(values.sum()), layer, head)
        values = recorder.values[layer].double()  # (n_kv_heads, S, D)
        if attention.qkv_proj.bias is not None:
            value_bias = attention.qkv_proj.bias[-attention.sizes[2] :].cpu().double()
            value_bias = value_bias.view(len(values), 1, -1)
            values = values - value_bias
            n = config.n_heads // config.n_kv_heads
            biases += project(value_bias.repeat_interleave(n, dim=0).flatten(), to_heads)
        for head, weights in enumerate(recorder.weights[layer]):  # (n, S)
            to_head = to_heads.view(len(target), config.n_heads, -1)[:, head]  # (n, D)
            of_head = values[head * config.n_kv_heads // config.n_heads]  # (S, D)
            through_attention += (weights * (to_head @ of_head.T)).sum(dim=0)
        if attention.o_proj.bias is not None:
            add(f"layer {layer}, attention bias", project(attention.o_proj.bias, to_attn), layer)
            biases += parts[-1].logit
        add(f"layer {layer}, feed-forward", project(ffn_out, to_ffn), layer)
    if norm_bias is not None:
        add("final norm bias", norm_bias)
        biases += norm_bias
    if model.output_bias is not None:
        add("output bias", float(model.output_bias[list(target)].double().sum()))
        biases += parts[-1].logit
    return parts, through_attention, biases


def _through_norm(norm: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, float | None]:
    """Return directions (n, C) whose dot products with a part of x (n, C) are its contributions to
    norm(x) . direction, with the norm's scale at x; and the contribution of the norm's bias."""
    if isinstance(norm, RMSNorm):
        rms = (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
        return direction * norm.scale.cpu().double() / rms, None
    assert isinstance(norm, LayerNorm)
    weighted = direction * norm.scale.cpu().double()
    # (x - mean x) . w is x . (w - mean w)
    centered = weighted - weighted.mean(dim=-1, keepdim=True)
    scale = (x.var(dim=-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    if norm.bias is None:
        return centered / scale, None
    return centered / scale, float((direction @ norm.bias.cpu().double()).sum()) / norm.divisor
