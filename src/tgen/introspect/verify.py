"""Is what is shown what the model does? Checks that go through the fused kernel itself."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tgen.introspect.attention import AttentionRecorder, batch_of
from tgen.introspect.lens import lens_of
from tgen.introspect.passing import blocks_of, hooked
from tgen.introspect.why import why_of
from tgen.model.transformer import Transformer
from tgen.reports import Check
from tgen.tokenizer import Tokenizer

ROW_LIMIT = KERNEL_LIMIT = 1e-5
_LOGIT_LIMIT, _SUM_LIMIT = 1e-4, 1e-3


def footer_checks(recorder: AttentionRecorder) -> list[Check]:
    """What every run knows anyway."""
    return [
        Check(name="rows sum to 1", value=recorder.row_error, limit=ROW_LIMIT),
        Check(
            name="weights times values are the fused kernel's result",
            value=recorder.difference,
            limit=KERNEL_LIMIT,
        ),
    ]


class _Checking(AttentionRecorder):
    """Compares all weights with the kernel's own, and keeps what they make of the values."""

    def __init__(self) -> None:
        super().__init__(self._check)
        self.kernel = self.future = self.below_zero = 0.0
        self.eager: list[Tensor] = []

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor) -> None:
        """One layer."""
        self._own = _kernel_weights(q, k)
        self._values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        self._parts: list[Tensor] = []
        super().attention(layer, q, k, v, mixed)
        self.eager.append(torch.cat(self._parts, dim=2).transpose(1, 2).flatten(2))  # (1, T, H D)

    def _check(self, layer: int, first: int, weights: Tensor) -> None:
        del layer
        n, seen = weights.shape[-2:]
        own = self._own[:, :, first : first + n]
        self.kernel = max(self.kernel, float((own[..., :seen] - weights).abs().max()))
        future = weights.triu(1 + seen - n).abs().max()
        self.future = max(self.future, float(future), float(own[..., seen:].abs().sum()))
        self.below_zero = max(self.below_zero, float(-weights.min()), float(weights.isnan().sum()))
        self._parts.append(weights @ self._values[:, :, :seen])


def _kernel_weights(q: Tensor, k: Tensor) -> Tensor:
    """(1, H, T, T): the fused kernel's own weights. Values that are a unit matrix, a block of
    columns at a time, come out as the weights themselves."""
    T, D = q.shape[2:]
    unit = torch.eye(T, dtype=q.dtype, device=q.device)
    parts = []
    for i in range(0, T, D):
        values = F.pad(unit[:, i : i + D], (0, max(0, i + D - T))).expand(*k.shape[:2], T, D)
        parts.append(
            F.scaled_dot_product_attention(
                q, k, values, is_causal=T > 1, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(parts, dim=-1)[..., :T]


@torch.no_grad()
def verify(model: Transformer, tokenizer: Tokenizer, ids: Sequence[int]) -> list[Check]:
    """All checks over a text, every layer and head."""
    recorder = _Checking()
    tokens = batch_of(model, [ids])
    x = model.hidden(tokens, recorder=recorder)[0]
    checks = [
        *footer_checks(recorder),
        Check(
            name="weights are the kernel's own",
            value=recorder.kernel,
            limit=KERNEL_LIMIT,
            note="values that are a unit matrix come out of it as its weights",
        ),
        Check(name="the future's weight", value=recorder.future, limit=0.0),
        Check(name="weights below 0 or not a number", value=recorder.below_zero, limit=0.0),
        Check(
            name="logits with these weights in the kernel's place",
            value=_eager_difference(model, tokens, recorder.eager, x),
            limit=_LOGIT_LIMIT,
        ),
        Check(
            name="causality: another last token changes vectors before it",
            value=_looks_ahead(model, ids, x),
            limit=0.0,
        ),
    ]
    if not model.config.post_norm:
        lens = lens_of(model, tokenizer, ids, query=len(ids) - 1, first=len(ids) - 1)
        why = why_of(model, tokenizer, ids, query=len(ids) - 1)
        logits = model.logits(x[-1])
        last = abs(lens.candidates[-1][0].logit - float(logits.max()))
        checks += [
            Check(name="the lens's last layer is the model", value=last, limit=_LOGIT_LIMIT),
            Check(name="the parts of a logit sum to it", value=why.difference, limit=_SUM_LIMIT),
        ]
    return checks


def _eager_difference(model: Transformer, tokens: Tensor, eager: list[Tensor], x: Tensor) -> float:
    """Between the last logits and those of a pass whose attention is ours."""
    ours = iter(eager)

    def replace(_: nn.Module, __: tuple[Tensor]) -> Any:
        return (next(ours),)

    with hooked(*(b.attention.o_proj.register_forward_pre_hook(replace) for b in blocks_of(model))):
        again = model.hidden(tokens)[0]
    return float((model.logits(again[-1]) - model.logits(x[-1])).abs().max())


def _looks_ahead(model: Transformer, ids: Sequence[int], x: Tensor) -> float:
    other = [*ids[:-1], (ids[-1] + 1) % model.config.vocab_size]
    changed = model.hidden(batch_of(model, [other]))[0]
    before = (changed[:-1] - x[:-1]).abs()
    return float(before.max()) if before.numel() else 0.0
