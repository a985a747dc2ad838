import pytest
import torch
import torch.nn.functional as F

from tgen.model.attention import attend
from tgen.model.attention_mask import causal_mask, document_mask
from tgen.model.product_precision import product_precision


def results(attention, inputs, grad):
    """The output and the gradients of q, k and v."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def make_inputs(T, *, n_heads=4, n_kv_heads=4, head_dim=16):
    torch.manual_seed(0)
    shapes = [(2, T, n, head_dim) for n in (n_heads, n_kv_heads, n_kv_heads, n_heads)]
    *inputs, grad = (torch.randn(shape).transpose(1, 2) for shape in shapes)
    return inputs, grad


def make_mask(name, T):
    if name == "window":
        return causal_mask(torch.arange(T), T, 20)
    if name == "documents":
        documents = torch.stack([torch.arange(T) * 3 // T, torch.arange(T) * 2 // T])
        return document_mask(documents, None)
    return None


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mask_name", [None, "window", "documents"])
@pytest.mark.parametrize("T", [1, 50, 128, 300])
def test_attention_in_training_equals_the_fused_kernel(T, mask_name, n_kv_heads):
    inputs, grad = make_inputs(T, n_kv_heads=n_kv_heads)
    mask = make_mask(mask_name, T)

    def fused(q, k, v):
        causal = mask is None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=0.3, enable_gqa=True
        )

    expected = results(fused, inputs, grad)
    ours = results(lambda *qkv: attend(*qkv, mask=mask, scale=0.3), inputs, grad)
    for exact, out in zip(expected, ours, strict=True):
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [50, 300])
def test_attention_in_bfloat16_equals_float32_within_its_precision(T):
    inputs, grad = make_inputs(T)

    def attention(q, k, v):
        return attend(q, k, v, mask=None, scale=None)

    expected = results(attention, inputs, grad)
    with product_precision("bfloat16"):
        rounded = results(attention, inputs, grad)
    for exact, out in zip(expected, rounded, strict=True):
        assert out.dtype == exact.dtype
        assert 1e-4 < ((out - exact).norm() / exact.norm()).item() < 1e-2
