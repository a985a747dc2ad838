"""Products of reduced precision: where they apply, and what they cost."""

import pytest
import torch
import torch.nn.functional as F

import tgen.model.product_precision as precision_module
from tgen.model.product_precision import in_full_precision, product_precision

# On AMD's CPUs with AVX512_BF16, torch keeps float32.
needs_amx = pytest.mark.skipif(
    not getattr(torch.cpu, "_is_amx_tile_supported", bool)(), reason="this CPU has no AMX"
)


def error(out, x, w):
    exact = x.double() @ w.double()
    return ((out - exact).norm() / exact.norm()).item()


@needs_amx
def test_inputs_are_rounded_and_sums_are_float32():
    torch.manual_seed(0)
    x, w = torch.randn(256, 384), torch.randn(384, 512)
    with product_precision("bfloat16"):
        assert 1e-4 < error(x @ w, x, w) < 5e-3
    assert error(x @ w, x, w) < 1e-6
    with product_precision("float32"):
        assert error(x @ w, x, w) < 1e-6


def test_precision_is_restored_after_an_error():
    before = precision_module._MATMUL.fp32_precision
    with pytest.raises(RuntimeError), product_precision("bfloat16"):
        raise RuntimeError
    assert precision_module._MATMUL.fp32_precision == before


def test_attention_and_its_gradients_have_full_precision():
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 2, 64, 32)
    results = []
    for precision in ("float32", "bfloat16"):
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        with product_precision(precision):
            out = in_full_precision(F.scaled_dot_product_attention, *inputs)
            out.backward(grad)
            after = precision_module._MATMUL.fp32_precision
        assert after == ("ieee" if precision == "float32" else "bf16")
        results.append([out, *(tensor.grad for tensor in inputs)])
    for full, reduced in zip(*results, strict=True):
        assert torch.equal(full, reduced)
