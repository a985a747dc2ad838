"""Direct logit attribution: a logit as the sum of each component's contribution.

With the final norm's scale held constant, the logit is linear in the residual stream, so every
head, feed-forward layer and embedding has a contribution (Elhage et al. 2021). Likewise, the norm
of a layer's output, where there is one, is linear in the heads at the scale that it has.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tgen.inspection.hooks import hooks_removed, model_blocks, require_residual_stream, token_batch
from tgen.model.transformer import LayerNorm, RMSNorm, Transformer
from tgen.reports.inspection import AttributionReport, Contribution
from tgen.tokenizer import Tokenizer


class _ComponentRecorder:
    """A recorder of each component's output to the residual stream at one position."""

    def __init__(self, query: int) -> None:
        self._query = query
        self.head_outs: list[Tensor] = []  # (H D), before the output projection
        self.attn_outs: list[Tensor] = []  # (C), before a norm of the output
        self.ffn_outs: list[Tensor] = []  # (C), the same
        self.final_residual = torch.zeros(0)  # (C), before the final norm

    def record_heads(self, _: nn.Module, arguments: tuple[Tensor]) -> None:
        self.head_outs.append(arguments[0][0, self._query].cpu().double())

    def record_attention(self, _: nn.Module, __: Any, out: Tensor) -> None:
        self.attn_outs.append(out[0, self._query].cpu().double())

    def record_feed_forward(self, _: nn.Module, __: Any, out: Tensor) -> None:
        self.ffn_outs.append(out[0, self._query].cpu().double())

    def record_final(self, _: nn.Module, arguments: tuple[Tensor]) -> None:
        self.final_residual = arguments[0][0, self._query].cpu().double()


@torch.no_grad()
def attribute_logit(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    query: int,
    target: int | None = None,
) -> AttributionReport:
    """Return the contributions to the logit of `target` after position `query`; by default the
    target is the most likely token. Raises UsageError for a post-norm model."""
    require_residual_stream(model, "--view why")
    recorder = _ComponentRecorder(query)
    blocks = model_blocks(model)
    with hooks_removed(
        *(b.attention.o_proj.register_forward_pre_hook(recorder.record_heads) for b in blocks),
        *(b.attention.register_forward_hook(recorder.record_attention) for b in blocks),
        *(b.feed_forward.register_forward_hook(recorder.record_feed_forward) for b in blocks),
        model.final_norm.register_forward_pre_hook(recorder.record_final),
    ):
        x = model.hidden_states(token_batch(model, [ids]))[0, query]
    logits = model.logits(x).float()
    target = int(logits.argmax()) if target is None else target
    unembedding = model.output_weight[target].cpu().double()
    direction, bias_logit = _through_norm(model.final_norm, recorder.final_residual, unembedding)

    parts: list[Contribution] = []

    def add(name: str, logit: float, layer: int | None = None, head: int | None = None) -> None:
        parts.append(Contribution(component=name, layer=layer, head=head, logit=logit))

    def project(vector: Tensor, onto: Tensor = direction) -> float:
        return float(vector.cpu().double() @ onto)

    scale = model.config.embedding_scale
    add("token embedding", project(model.token_embedding.weight[ids[query]]) * scale)
    if model.config.position == "learned":
        add("position embedding", project(model.position_embedding.weight[query]))
    for layer, block in enumerate(blocks):
        attn_out, ffn_out = recorder.attn_outs[layer], recorder.ffn_outs[layer]
        to_attn = to_ffn = direction * block.residual_scale
        if block.normalizes_outputs:
            to_attn, _ = _through_norm(block.attention_output_norm, attn_out, to_attn)
            to_ffn, _ = _through_norm(block.feed_forward_output_norm, ffn_out, to_ffn)
        W_O = block.attention.o_proj
        per_dimension = (to_attn @ W_O.weight.cpu().double()) * recorder.head_outs[layer]
        for head, values in enumerate(per_dimension.view(model.config.n_heads, -1)):
            add(f"layer {layer}, head {head}", float(values.sum()), layer, head)
        if W_O.bias is not None:
            add(f"layer {layer}, attention bias", project(W_O.bias, to_attn), layer)
        add(f"layer {layer}, feed-forward", project(ffn_out, to_ffn), layer)
    if bias_logit is not None:
        add("final norm bias", bias_logit)
    if model.output_bias is not None:
        add("output bias", float(model.output_bias[target]))
    logit = float(logits[target])
    return AttributionReport(
        query=query,
        target=target,
        target_text=tokenizer.token_bytes(target),
        probability=float(logits.softmax(dim=-1)[target]),
        logit=logit,
        contributions=sorted(parts, key=lambda part: -abs(part.logit)),
        difference=abs(sum(part.logit for part in parts) - logit),
        normalizes_outputs=blocks[0].normalizes_outputs,
    )


def _through_norm(norm: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, float | None]:
    """Return the direction (C,) whose dot product with a part of x is the part's contribution to
    norm(x) . direction, with the norm's scale at x; and the contribution of the norm's bias."""
    if isinstance(norm, RMSNorm):
        return direction * norm.scale.cpu().double() / (x.square().mean() + norm.eps).sqrt(), None
    assert isinstance(norm, LayerNorm)
    weighted = direction * norm.scale.cpu().double()
    centered = weighted - weighted.mean()  # (x - mean x) . w is x . (w - mean w)
    scale = (x.var(unbiased=False) + norm.eps).sqrt()
    if norm.bias is None:
        return centered / scale, None
    return centered / scale, float(direction @ norm.bias.cpu().double()) / norm.divisor
