"""Causal attention: torch's fused kernel, or batched products for training on a CPU.

On a CPU, the fused kernel multiplies small parts of one head at a time, in float32. One product for
a block of queries of all heads is faster, above all in bfloat16. The backward pass needs the
attention weights, which are stored: long sequences take the fused kernel, as do those of a single
block, for which it is as fast.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tgen.model.product_precision import in_full_precision, products_are_bfloat16

BLOCK = 128  # queries: a block skips the keys after its last query
_MAX_LENGTH = 1024  # tokens


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return softmax(scale q k^T) v, (B, H, T, D), for q (B, H, T, D) and k, v
    (B, n_kv_heads, S, D); the scale is 1 / sqrt(D) if None.

    `mask` (T, S) or (B, 1, T, S) bool is True where a query sees a key, at most up to its own
    position; None aligns the first query with the first key, but a single query sees all keys.
    """
    T, S = q.shape[2], k.shape[2]
    if q.device.type == "cpu" and torch.is_grad_enabled() and T == S and stores_weights(T):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = _BlockAttention.apply(q, k, v, mask, scale)  # type: ignore[no-untyped-call]
        return out
    return in_full_precision(
        lambda q, k, v: F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and T > 1,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        ),
        q,
        k,
        v,
    )


def stores_weights(length: int) -> bool:
    """Whether training on sequences of this length on a CPU stores their attention weights."""
    return BLOCK < length <= _MAX_LENGTH


class _BlockAttention(torch.autograd.Function):
    """O = P V with P = softmax(S), S = scale Q K^T. With the gradient G of O: dV = P^T G,
    dP = G V^T, dS = P (dP - sum(P dP)), dQ = scale dS K, dK = scale dS^T Q."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        ctx.dtype, ctx.scale = q.dtype, scale
        out = _positions_first(q)
        (B, H, T, _), n_kv = q.shape, k.shape[1]
        q, k, v = (_heads_first(x, B * n_kv) for x in (q, k, v))  # (B n_kv, heads, T, D)
        later = torch.full((BLOCK, BLOCK), -math.inf, dtype=q.dtype).triu(1)
        stored = []
        for start in range(0, T, BLOCK):
            end = min(start + BLOCK, T)
            scores = _scaled_product(_block(q, start, end), k[:, 0, :end].mT, scale)
            by_head = scores.view(B, H, end - start, end)
            if mask is None:
                by_head[..., start:] += later[: end - start, : end - start]
            else:
                by_head.masked_fill_(~mask[..., start:end, :end], -math.inf)
            weights = scores.softmax(-1)
            out[:, :, start:end] = (weights @ v[:, 0, :end]).view(B, H, end - start, -1)
            stored.append(weights)
        ctx.save_for_backward(q, k, v, *stored)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *stored = ctx.saved_tensors
        B, H, T, D = grad.shape
        n_kv = len(k) // B
        q_grad = _positions_first(grad)
        k_grad, v_grad = (_positions_first(grad[:, :n_kv]) for _ in range(2))
        grad = _heads_first(grad, B * n_kv)
        starts = range(0, T, BLOCK)
        for start, weights in reversed([*zip(starts, stored, strict=True)]):
            end = min(start + BLOCK, T)
            rows = _block(grad, start, end)
            v_part = weights.mT @ rows
            weight_grad = rows @ v[:, 0, :end].mT
            score_grad = torch._softmax_backward_data(weight_grad, weights, -1, weights.dtype)
            q_part = _scaled_product(score_grad, k[:, 0, :end], ctx.scale)
            k_part = _scaled_product(score_grad.mT, _block(q, start, end), ctx.scale)
            q_grad[:, :, start:end] = q_part.view(B, H, end - start, D)
            for total, part in ((k_grad, k_part), (v_grad, v_part)):
                if end == T:  # the first of these blocks, which has all keys
                    total.copy_(part.view(B, n_kv, T, D))
                else:
                    total[:, :, :end] += part.view(B, n_kv, end, D)
        return q_grad, k_grad, v_grad, None, None


def _heads_first(x: Tensor, n: int) -> Tensor:
    """(B, heads, T, D) -> (n, B heads / n, T, D) in the dtype of products, contiguous."""
    dtype = torch.bfloat16 if products_are_bfloat16() else x.dtype
    x = x.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return x.view(n, -1, *x.shape[2:])


def _positions_first(x: Tensor) -> Tensor:
    """Return an empty tensor like x (B, heads, T, D) whose memory is ordered (B, T, heads, D)."""
    B, heads, T, D = x.shape
    return x.new_empty(B, T, heads, D).transpose(1, 2)


def _block(x: Tensor, start: int, end: int) -> Tensor:
    """(n, heads, T, D) -> (n, heads rows, D), the rows from `start` to `end` of each head."""
    return x[:, :, start:end].flatten(1, 2)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)
