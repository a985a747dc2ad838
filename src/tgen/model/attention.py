"""Causal attention and its masks: which keys each query may see, and the products with them.

They are torch's fused kernel, or, in training on a CPU, products of chunks of queries. On a CPU,
the fused kernel multiplies small parts of one head at a time, in float32. One product for a chunk
of the queries of all heads is faster, above all in bfloat16, but the backward pass needs the
attention weights, which are stored.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tgen.config.training import MAX_STORED_LENGTH, QUERY_CHUNK
from tgen.model.precision import in_full_precision, products_are_bfloat16

# Sequences up to this length are not split, and a span shorter than this continues with the next
# document: small calls cost more than they save (measured on two cores).
_MIN_SPLIT_LENGTH, _MIN_SPAN = 256, 48


class DocumentSpan(NamedTuple):
    """A part of a sequence of packed documents that attends only to itself."""

    length: int
    mask: Tensor | None  # (1, 1, length, length) bool; None: plain causal attention


def causal_mask(positions: Tensor, n_keys: int, window: int | None) -> Tensor:
    """Return a bool mask (..., T, S) for queries at `positions` (..., T) and S keys from 0.

    A query sees no key after itself and, with a window, at most that many keys including its own.
    """
    keys = torch.arange(n_keys, device=positions.device)
    seen = keys <= positions[..., None]
    return seen if window is None else seen & (keys > positions[..., None] - window)


def document_positions(documents: Tensor) -> Tensor:
    """Return the positions within documents (B, T), whose numbers (B, T) do not decrease."""
    index = torch.arange(documents.shape[1], device=documents.device)
    return index - torch.searchsorted(documents, documents)  # minus the document's start


def document_mask(documents: Tensor, window: int | None) -> Tensor:
    """Return a bool mask (B, 1, T, T) for packed documents, whose numbers (B, T) do not decrease.

    A query sees the keys of its own document that `causal_mask` allows.
    """
    T = documents.shape[1]
    index = torch.arange(T, device=documents.device)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & causal_mask(index, T, window)


def document_spans(documents: Tensor, window: int | None) -> list[list[DocumentSpan]] | None:
    """Split each sequence of packed documents, whose numbers (B, T) do not decrease, into spans
    that give the same attention as `document_mask`; None where that would not be faster.

    A span is one document, or short ones and the document after them.
    """
    B, T = documents.shape
    if T <= _MIN_SPLIT_LENGTH or documents.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    sequences = []
    for sequence in documents:
        starts, start = [0], 0
        for border in (sequence.diff().nonzero().flatten() + 1).tolist():
            if border - start >= _MIN_SPAN:
                starts.append(start := border)
        sequences.append([sequence[start:end] for start, end in pairwise([*starts, T])])
    if 2 * sum(len(span) ** 2 for spans in sequences for span in spans) > B * T * T:
        return None
    return [[_make_span(span, window) for span in spans] for spans in sequences]


def _make_span(documents: Tensor, window: int | None) -> DocumentSpan:
    n = len(documents)
    if documents[0] == documents[-1] and (window is None or window >= n):
        return DocumentSpan(n, None)
    return DocumentSpan(n, document_mask(documents[None], window))


Mask = Tensor | list[list[DocumentSpan]] | None


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None) -> Tensor:
    """Return softmax(scale q k^T) v, (B, H, T, D) in the dtype of q, for q (B, H, T, D) and k, v
    (B, n_kv_heads, S, D); the scale is 1 / sqrt(D) if None.

    A `mask` (T, S) or (B, 1, T, S) bool is True where a query sees a key, at most up to its own
    position; spans of each sequence are computed one by one. None aligns the first query with the
    first key, but a single query sees all keys. On a CPU, the fused kernel computes in float32;
    in chunks, q, k, v, the scores and the attention weights are bfloat16 if products are.
    """
    in_chunks = _trains_on_cpu(q) and q.shape[2] == k.shape[2] <= MAX_STORED_LENGTH

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None) -> Tensor:
        attention = _attend_in_chunks if in_chunks and q.shape[2] > QUERY_CHUNK else _attend_fused
        return attention(q, k, v, mask=mask, scale=scale)

    if not isinstance(mask, list):
        return kernel(q, k, v, mask=mask)
    outs = []
    for spans, *sequence in zip(mask, *(torch.split(x, 1) for x in (q, k, v)), strict=True):
        lengths = [span.length for span in spans]
        parts = zip(spans, *(torch.split(x, lengths, dim=2) for x in sequence), strict=True)
        out = [kernel(*part, mask=span_mask) for (_, span_mask), *part in parts]
        outs.append(torch.cat(out, dim=2))
    return torch.cat(outs)


def _trains_on_cpu(q: Tensor) -> bool:
    """Whether q needs gradients on a CPU and is not being compiled, which chunks would break up."""
    needs_gradients = torch.is_grad_enabled() and q.requires_grad
    return needs_gradients and q.device.type == "cpu" and not torch.compiler.is_compiling()


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float | None
) -> Tensor:
    kernel = partial(
        F.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=mask is None and q.shape[2] > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return in_full_precision(kernel, q, k, v)


def _attend_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float | None
) -> Tensor:
    scaled = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    out: Tensor = _ChunkedAttention.apply(scaled, k, v, mask)  # type: ignore[no-untyped-call]
    return out


class _ChunkedAttention(torch.autograd.Function):
    """Attention (B, H, T, D) of scaled q (B, H, T, D) to k, v (B, n_kv_heads, T, D).

    O = P V with P = softmax(S), S = Q K^T. With the gradient G of O: dV = P^T G, dP = G V^T,
    dS = P (dP - sum(P dP)), dQ = dS K, dK = dS^T Q.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        (B, H, T, _), n_kv = q.shape, k.shape[1]
        out = _empty_positions_first(q)
        rounds = products_are_bfloat16() and q.dtype == torch.float32
        dtype = torch.bfloat16 if rounds else q.dtype
        q, k, v = (_to_heads_first(x, B * n_kv, dtype) for x in (q, k, v))
        future = torch.full((QUERY_CHUNK, QUERY_CHUNK), -math.inf, dtype=dtype).triu(1)
        stored = []
        for start in range(0, T, QUERY_CHUNK):
            end = min(start + QUERY_CHUNK, T)
            scores = _queries(q, start, end) @ k[:, 0, :end].mT
            by_head = scores.view(B, H, end - start, end)
            if mask is None:
                by_head[..., start:] += future[: end - start, : end - start]
            else:
                by_head.masked_fill_(~mask[..., start:end, :end], -math.inf)
            attention_weights = scores.softmax(-1)
            chunk = attention_weights @ v[:, 0, :end]
            out[:, :, start:end] = chunk.view(B, H, end - start, -1)
            stored.append(attention_weights)
        ctx.save_for_backward(q, k, v, *stored)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *stored = ctx.saved_tensors
        B, H, T, D = grad.shape
        n_kv = len(k) // B
        q_grad = _empty_positions_first(grad)
        k_grad, v_grad = (_empty_positions_first(grad[:, :n_kv]) for _ in range(2))
        grad = _to_heads_first(grad, B * n_kv, q.dtype)
        chunks = zip(range(0, T, QUERY_CHUNK), stored, strict=True)
        for start, attention_weights in reversed([*chunks]):
            end = min(start + QUERY_CHUNK, T)
            out_grad = _queries(grad, start, end)
            weights_grad = out_grad @ v[:, 0, :end].mT
            score_grad = torch._softmax_backward_data(
                weights_grad, attention_weights, -1, attention_weights.dtype
            )
            q_grad[:, :, start:end] = (score_grad @ k[:, 0, :end]).view(B, H, end - start, D)
            k_part = score_grad.mT @ _queries(q, start, end)
            v_part = attention_weights.mT @ out_grad
            for total, part in ((k_grad, k_part), (v_grad, v_part)):
                if end == T:  # the last chunk comes first and sees all keys
                    total.copy_(part.view(B, n_kv, T, D))
                else:
                    total[:, :, :end] += part.view(B, n_kv, end, D)
        return q_grad, k_grad, v_grad, None


def _empty_positions_first(x: Tensor) -> Tensor:
    """Return an empty tensor like x (B, heads, T, D), ordered (B, T, heads, D) in memory."""
    B, heads, T, D = x.shape
    return x.new_empty(B, T, heads, D).transpose(1, 2)


def _to_heads_first(x: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return x (B, heads, T, D) as a contiguous (n, B heads / n, T, D) of this dtype."""
    return x.to(dtype).contiguous().view(n, -1, *x.shape[2:])


def _queries(x: Tensor, start: int, end: int) -> Tensor:
    """Return queries `start` to `end` of the heads, (n, heads, T, D) -> (n, heads queries, D)."""
    return x[:, :, start:end].flatten(1, 2)
