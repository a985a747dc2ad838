"""Attention in training on a CPU equals torch's fused kernel."""

import pytest
import torch
import torch.nn.functional as F

from tgen.model import attention
from tgen.model.attention import DocumentSpan, attend, causal_mask, document_mask
from tgen.model.precision import product_precision


def results(function, inputs, grad):
    """The output and the gradients of q, k and v."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def make_inputs(T, *, n_heads=4, n_kv_heads=4, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(2, T, n, 16) for n in (n_heads, n_kv_heads, n_kv_heads, n_heads)]
    *inputs, grad = (torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes)
    return inputs, grad


def make_mask(name, T):
    if name == "window":
        return causal_mask(torch.arange(T), T, 20)
    if name == "documents":
        documents = torch.stack([torch.arange(T) * 3 // T, torch.arange(T) * 2 // T])
        return document_mask(documents, None)
    return None


def forbid(*_, **__):
    raise AssertionError


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mask_name", [None, "window", "documents"])
@pytest.mark.parametrize(("T", "scale"), [(129, None), (256, 0.3), (300, None)])
def test_attention_in_chunks_equals_the_fused_kernel(T, scale, mask_name, n_kv_heads, monkeypatch):
    inputs, grad = make_inputs(T, n_kv_heads=n_kv_heads, dtype=torch.float64)
    mask = make_mask(mask_name, T)

    def fused(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )

    expected = results(fused, inputs, grad)
    monkeypatch.setattr(F, "scaled_dot_product_attention", forbid)
    ours = results(lambda *qkv: attend(*qkv, mask=mask, scale=scale), inputs, grad)
    for exact, out in zip(expected, ours, strict=True):
        torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("mask_name", [None, "documents"])
@pytest.mark.parametrize("factor", [1, 16])
def test_rounded_attention_is_about_as_close_as_its_rounded_inputs(factor, mask_name, n_kv_heads):
    inputs, grad = make_inputs(300, n_kv_heads=n_kv_heads)
    inputs[0] = factor * inputs[0]  # large scores, as some pretrained models have
    mask = make_mask(mask_name, 300)

    def fused(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    expected = results(fused, inputs, grad)
    best = results(fused, [x.bfloat16().float() for x in inputs], grad.bfloat16().float())
    with product_precision("bfloat16"):
        rounded = results(lambda *qkv: attend(*qkv, mask=mask, scale=None), inputs, grad)
    for exact, out, other in zip(expected, rounded, best, strict=True):
        assert out.dtype == exact.dtype
        error, least = ((x - exact).norm() / exact.norm() for x in (out, other))
        assert 1e-4 < error < 2 * least


def make_random(T, S=None, *, requires_grad=True):
    return [torch.randn(1, 2, n, 8, requires_grad=requires_grad) for n in (T, S or T, S or T)]


def test_other_attention_is_fused(monkeypatch):
    monkeypatch.setattr(attention._ChunkedAttention, "apply", forbid)
    attend(*make_random(128), mask=None, scale=None)
    attend(*make_random(1025), mask=None, scale=None)
    for lengths in ((500, 525), (100, 128)):
        spans = [[DocumentSpan(length, None) for length in lengths]]
        attend(*make_random(sum(lengths)), mask=spans, scale=None)
    attend(*make_random(1, 300), mask=None, scale=None)
    attend(*make_random(300, requires_grad=False), mask=None, scale=None)
    attend(*(x.to("meta") for x in make_random(300)), mask=None, scale=None)
    with torch.no_grad():
        attend(*make_random(300), mask=None, scale=None)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    attend(*make_random(300), mask=None, scale=None)
