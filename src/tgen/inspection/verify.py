"""Is what is shown what the model does? Checks that go through the fused kernel itself."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tgen.inspection.attention import AttentionRecorder, batch_of, worse
from tgen.inspection.hooks import blocks_of, hooked, logits_in_parts
from tgen.inspection.logit_attribution import why_of
from tgen.inspection.logit_lens import lens_of
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
    """Compares all weights with the kernel's own, and keeps a layer's mix of the values by them."""

    def __init__(self) -> None:
        super().__init__(self._keep)
        self.kernel = self.future = self.below_zero = 0.0
        self.mixed = torch.zeros(0)  # (1, T, H D), of the last layer that came by

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mixed: Tensor
    ) -> None:
        """One layer."""
        T = q.shape[2]
        weights = self._weights = q.new_zeros(*q.shape[:2], T, T)
        super().attention(layer, q, k, v, mask, mixed)
        self._weights = torch.zeros(0)  # gone with this call: two layers would be twice the memory
        values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        self.mixed = (weights @ values).transpose(1, 2).flatten(2)
        for first, own in _kernel_weights(q, k, mask):
            ours = weights[..., first : first + own.shape[-1]]
            self.kernel = worse(self.kernel, float((own - ours).abs().max()))
            self.future = worse(self.future, float(own.triu(1 - first).abs().max()))
            self.below_zero = worse(self.below_zero, float(-own.min()))

    def _keep(self, layer: int, first: int, weights: Tensor) -> None:
        del layer
        n, seen = weights.shape[-2:]
        self._weights[:, :, first : first + n, :seen] = weights


def _kernel_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """The fused kernel's own weights (1, H, T, n) of the keys from each first one on. Values that
    are a unit matrix, a block of columns at a time, come out as the weights themselves."""
    T, D = q.shape[2:]
    unit = torch.eye(T, dtype=q.dtype, device=q.device)
    for first in range(0, T, D):
        block = unit[:, first : first + D]
        values = F.pad(block, (0, D - block.shape[1])).expand(*k.shape[:2], T, D)
        own = F.scaled_dot_product_attention(
            q,
            k,
            values,
            attn_mask=mask,
            is_causal=mask is None and T > 1,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        yield first, own[..., : block.shape[1]]


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
        Check(name="weights below 0", value=recorder.below_zero, limit=0.0),
        Check(
            name="logits with these weights in the kernel's place",
            value=_eager_difference(model, tokens, x),
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


def _eager_difference(model: Transformer, tokens: Tensor, x: Tensor) -> float:
    """Between the logits and those of a pass in which every layer mixes by our weights."""
    recorder = _Checking()

    def replace(_: nn.Module, __: tuple[Tensor]) -> Any:
        return (recorder.mixed,)

    with hooked(*(b.attention.o_proj.register_forward_pre_hook(replace) for b in blocks_of(model))):
        again = model.hidden(tokens, recorder=recorder)[0]
    worst = 0.0
    for (_, ours), (_, theirs) in zip(
        logits_in_parts(model, again), logits_in_parts(model, x), strict=True
    ):
        worst = worse(worst, float((ours - theirs).abs().max()))
    return worst


def _looks_ahead(model: Transformer, ids: Sequence[int], x: Tensor) -> float:
    other = [*ids[:-1], (ids[-1] + 1) % model.config.vocab_size]
    changed = model.hidden(batch_of(model, [other]))[0]
    before = (changed[:-1] - x[:-1]).abs()
    return float(before.max()) if before.numel() else 0.0
