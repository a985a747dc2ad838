"""Self-checks that the output equals the model's computation, tested on the fused kernel."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tgen.config import ModelConfig
from tgen.inspection.attention import AttentionRecorder, larger_error
from tgen.inspection.hooks import hook_part, hooks_removed, iterate_logits, token_batch
from tgen.inspection.logit_attribution import attribute_logit
from tgen.inspection.logit_lens import logit_lens
from tgen.model.transformer import Transformer
from tgen.reports.inspection import Check
from tgen.tokenizer import Tokenizer

ROW_LIMIT = KERNEL_LIMIT = 1e-5
_LOGIT_LIMIT, _SUM_LIMIT = 1e-4, 1e-3


def basic_checks(recorder: AttentionRecorder) -> list[Check]:
    """Return the checks that every recording makes possible."""
    return [
        Check("attention rows sum to 1", recorder.row_sum_error, ROW_LIMIT),
        Check(
            "weights times values equal the fused kernel's output",
            recorder.kernel_error,
            KERNEL_LIMIT,
        ),
    ]


class _VerifyingRecorder(AttentionRecorder):
    """A recorder that compares all weights with the kernel's, and stores our layer output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(self._store, scale=config.score_scale)
        self._config = config
        self.weight_error = self.future_weight = self.past_weight = self.negative_weight = 0.0
        self.attn_out = torch.zeros(0)  # (1, T, H D), of the last recorded layer

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_out: Tensor
    ) -> None:
        """Check one layer."""
        T = q.shape[2]
        weights = self._weights = q.new_zeros(*q.shape[:2], T, T)
        super().attention(layer, q, k, v, mask, attn_out)
        self._weights = torch.zeros(0)  # freed with this call: two layers would take twice as much
        values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        self.attn_out = (weights @ values).transpose(1, 2).flatten(2)
        window = self._config.window(layer) or T
        for first, kernel in _kernel_weights(q, k, mask, self._config.score_scale):
            ours = weights[..., first : first + kernel.shape[-1]]
            future = kernel.triu(1 - first)
            self.weight_error = larger_error(self.weight_error, float((kernel - ours).abs().max()))
            self.future_weight = larger_error(self.future_weight, float(future.abs().max()))
            past = kernel.tril(-window - first)
            self.past_weight = larger_error(self.past_weight, float(past.abs().max()))
            self.negative_weight = larger_error(self.negative_weight, float(-kernel.min()))

    def _store(self, layer: int, first: int, weights: Tensor) -> None:
        del layer
        n, n_keys = weights.shape[-2:]
        self._weights[:, :, first : first + n, :n_keys] = weights


def _kernel_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float
) -> Iterator[tuple[int, Tensor]]:
    """Yield the fused kernel's own weights (1, H, T, n), n keys at a time, with the first key.

    Values that are columns of the identity matrix make the kernel return its weights.
    """
    T, D = q.shape[2:]
    identity = torch.eye(T, dtype=q.dtype, device=q.device)
    for first in range(0, T, D):
        columns = identity[:, first : first + D]
        values = F.pad(columns, (0, D - columns.shape[1])).expand(*k.shape[:2], T, D)
        out = F.scaled_dot_product_attention(
            q,
            k,
            values,
            attn_mask=mask,
            is_causal=mask is None and T > 1,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        yield first, out[..., : columns.shape[1]]


@torch.no_grad()
def verify(model: Transformer, tokenizer: Tokenizer, ids: Sequence[int]) -> list[Check]:
    """Run all checks over a text, for every layer and head."""
    recorder = _VerifyingRecorder(model.config)
    tokens = token_batch(model, [ids])
    x = model.hidden_states(tokens, recorder=recorder)[0]
    checks = [
        *basic_checks(recorder),
        Check(
            "weights equal the fused kernel's weights",
            recorder.weight_error,
            KERNEL_LIMIT,
            "the kernel returns its attention weights for values that are the identity matrix",
        ),
        Check("weight on future keys is 0", recorder.future_weight, 0.0),
        Check("no weight is negative", recorder.negative_weight, 0.0),
        Check(
            "logits computed with these weights equal the model's",
            _eager_logit_error(model, tokens, x),
            _LOGIT_LIMIT,
        ),
        Check(
            "causality: the last token does not change earlier vectors",
            _causality_error(model, ids, x),
            0.0,
        ),
    ]
    if model.config.sliding_window is not None:
        checks.append(
            Check("weight on keys before the sliding window is 0", recorder.past_weight, 0.0)
        )
    if not model.config.post_norm:
        lens = logit_lens(model, tokenizer, ids, query=len(ids) - 1, first=len(ids) - 1)
        attribution = attribute_logit(model, tokenizer, ids, query=len(ids) - 1, left_out=range(0))
        assert attribution.difference is not None
        lens_error = abs(lens.candidates[-1][0].logit - float(model.logits(x[-1]).max()))
        checks += [
            Check("the logit lens at the last layer equals the model", lens_error, _LOGIT_LIMIT),
            Check("logit contributions sum to the logit", attribution.difference, _SUM_LIMIT),
        ]
    return checks


def _eager_logit_error(model: Transformer, tokens: Tensor, x: Tensor) -> float:
    """Return the largest logit difference from a pass in which every layer uses our weights,
    relative to the largest logit where that exceeds 1."""
    recorder = _VerifyingRecorder(model.config)
    layers = range(model.config.n_layers)
    hooks = (hook_part(model, "heads", i, lambda _: recorder.attn_out) for i in layers)
    with hooks_removed(*hooks):
        eager = model.hidden_states(tokens, recorder=recorder)[0]
    error = 0.0
    for (_, ours), (_, kernel) in zip(
        iterate_logits(model, eager), iterate_logits(model, x), strict=True
    ):
        difference = (ours - kernel).abs().max() / kernel.abs().max().clamp_min(1)
        error = larger_error(error, float(difference))
    return error


def _causality_error(model: Transformer, ids: Sequence[int], x: Tensor) -> float:
    """Return the largest change of earlier vectors when the last token is replaced."""
    changed = [*ids[:-1], (ids[-1] + 1) % model.config.vocab_size]
    difference = (model.hidden_states(token_batch(model, [changed]))[0, :-1] - x[:-1]).abs()
    return float(difference.max()) if difference.numel() else 0.0
