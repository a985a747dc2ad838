"""Why a token was expected: its logit as a sum of what each part of the model adds.

Direct logit attribution (Elhage et al. 2021): with the final norm's scale held as it is, the logit
is linear in the vectors that are added up, so every head, feed-forward and embedding has a share.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tgen.inspection.attention import batch_of
from tgen.inspection.hooks import blocks_of, hooked, require_residual_stream
from tgen.model.transformer import Transformer
from tgen.reports import Contribution, WhyReport
from tgen.tokenizer import Tokenizer


class _Parts:
    """Catches, at one position, what the model adds to its vectors."""

    def __init__(self, query: int) -> None:
        self._query = query
        self.mixed: list[Tensor] = []  # (H D), before the output projection
        self.fed: list[Tensor] = []  # (C)
        self.last = torch.zeros(0)  # (C), before the final norm

    def mix(self, _: nn.Module, arguments: tuple[Tensor]) -> None:
        self.mixed.append(arguments[0][0, self._query].cpu().double())

    def feed(self, _: nn.Module, __: Any, out: Tensor) -> None:
        self.fed.append(out[0, self._query].cpu().double())

    def end(self, _: nn.Module, arguments: tuple[Tensor]) -> None:
        self.last = arguments[0][0, self._query].cpu().double()


@torch.no_grad()
def why_of(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    query: int,
    target: int | None = None,
) -> WhyReport:
    """The logit of `target` after position `query`, taken apart; None: of the likeliest token.

    Raises UsageError where norms stand after the addition.
    """
    require_residual_stream(model, "--view why")
    parts = _Parts(query)
    with hooked(
        *(b.attention.o_proj.register_forward_pre_hook(parts.mix) for b in blocks_of(model)),
        *(b.feed_forward.register_forward_hook(parts.feed) for b in blocks_of(model)),
        model.final_norm.register_forward_pre_hook(parts.end),
    ):
        x = model.hidden(batch_of(model, [ids]))[0, query]
    logits = model.logits(x).float()
    target = int(logits.argmax()) if target is None else target
    direction, constant = _through_norm(model, parts.last, model.head[target].cpu().double())

    found = [_part("token embedding", model.token_embedding.weight[ids[query]], direction)]
    if model.config.position == "learned":
        found.append(_part("position", model.position_embedding.weight[query], direction))
    for layer, block in enumerate(blocks_of(model)):
        W_O = block.attention.o_proj
        onto = direction @ W_O.weight.cpu().double()  # (H D)
        for head, share in enumerate((onto * parts.mixed[layer]).view(model.config.n_heads, -1)):
            name = f"layer {layer}, head {head}"
            logit = float(share.sum())
            found.append(Contribution(part=name, layer=layer, head=head, logit=logit))
        if W_O.bias is not None:
            found.append(_part(f"layer {layer}, attention's bias", W_O.bias, direction, layer))
        found.append(_part(f"layer {layer}, feed-forward", parts.fed[layer], direction, layer))
    if constant is not None:
        name = "final norm's bias"
        found.append(Contribution(part=name, layer=None, head=None, logit=constant))
    logit = float(logits[target])
    return WhyReport(
        query=query,
        target=target,
        target_text=tokenizer.token_bytes(target),
        probability=float(logits.softmax(dim=-1)[target]),
        logit=logit,
        parts=sorted(found, key=lambda part: -abs(part.logit)),
        difference=abs(sum(part.logit for part in found) - logit),
    )


def _part(name: str, vector: Tensor, direction: Tensor, layer: int | None = None) -> Contribution:
    logit = float(vector.cpu().double() @ direction)
    return Contribution(part=name, layer=layer, head=None, logit=logit)


def _through_norm(
    model: Transformer, x: Tensor, unembedding: Tensor
) -> tuple[Tensor, float | None]:
    """(C,) the direction whose product with a vector is what it adds to the logit behind the final
    norm, whose scale is that of x; and what the norm's bias adds."""
    norm = model.final_norm
    weighed = unembedding * norm.get_parameter("weight").cpu().double()
    eps = model.config.norm_eps
    if model.config.norm == "rms_norm":
        return weighed / (x.square().mean() + eps).sqrt(), None
    centred = weighed - weighed.mean()  # (x - mean x) . w is x . (w - mean w)
    scale = (x.var(unbiased=False) + eps).sqrt()
    return centred / scale, float(unembedding @ norm.get_parameter("bias").cpu().double())
