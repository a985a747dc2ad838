"""Products of reduced precision: where they apply, and what they cost."""

import pytest
import torch

import tgen.model.precision as precision_module
from tgen.config import ModelConfig
from tgen.model.attention import attend
from tgen.model.dropout import Dropout
from tgen.model.precision import matmul, product_precision
from tgen.model.transformer import FeedForward, Linear
from tgen.training.loss import cross_entropy


def error(out, exact):
    return ((out - exact).norm() / exact.norm()).item()


def rounded(*tensors):
    return [t.bfloat16().double() for t in tensors]


def test_products_round_their_inputs_but_accumulate_in_float32():
    torch.manual_seed(0)
    x, w = torch.randn(256, 4096), torch.randn(64, 4096)
    with product_precision("bfloat16"):
        out = matmul(x, w.T)
    inputs = [t.double() for t in (x, w)]
    assert error(out, rounded(x, w)[0] @ rounded(x, w)[1].T) < 2**-8  # that of the result
    assert 1e-4 < error(out, inputs[0] @ inputs[1].T) < 5e-3
    with product_precision("float32"):
        assert error(matmul(x, w.T), inputs[0] @ inputs[1].T) < 1e-6


def test_gradients_of_a_rounded_layer_are_those_of_its_rounded_inputs():
    torch.manual_seed(0)
    layer = Linear(96, 80, bias=True, std=0.1)
    torch.nn.init.normal_(layer.bias)
    x, grad = torch.randn(2, 50, 96, requires_grad=True), torch.randn(2, 50, 80)
    with product_precision("bfloat16"):
        out = layer(x)
        out.backward(grad)
    x_, w_, grad_ = rounded(x.detach(), layer.weight.detach(), grad)
    bound = 2**-8
    assert error(out.detach(), x_ @ w_.T + layer.bias.detach()) < bound
    assert error(x.grad, grad_ @ w_) < bound
    assert error(layer.weight.grad, grad_.flatten(0, 1).T @ x_.flatten(0, 1)) < bound
    assert error(layer.bias.grad, grad.double().sum((0, 1))) < 1e-6


@pytest.mark.parametrize("trains_head", [True, False])
def test_rounding_does_not_reach_the_logits_of_the_loss(trains_head):
    torch.manual_seed(0)
    x, targets = torch.randn(300, 32), torch.randint(50, (300,))
    head = torch.randn(50, 32, requires_grad=trains_head)
    losses, gradients = [], []
    for precision in ("float32", "bfloat16"):
        inputs = x.clone().requires_grad_()
        with product_precision(precision):
            loss = cross_entropy(inputs, head, targets)
            (gradient,) = torch.autograd.grad(loss, inputs)
        losses.append(loss.item())
        gradients.append(gradient)
    assert abs(losses[1] - losses[0]) < 1e-2 * losses[0]
    assert 1e-5 < error(gradients[1], gradients[0]) < 2e-2


def test_precision_is_restored_after_an_error():
    before = precision_module._MATMUL.fp32_precision
    with pytest.raises(RuntimeError), product_precision("bfloat16"):
        raise RuntimeError
    assert precision_module._MATMUL.fp32_precision == before


def test_fused_attention_and_its_gradients_have_full_precision():
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 2, 64, 32)
    results = []
    for precision in ("float32", "bfloat16"):
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        with product_precision(precision):
            out = attend(*inputs, mask=None, scale=None)  # fused: a short sequence
            out.backward(grad)
            after = precision_module._MATMUL.fp32_precision
        assert after == ("ieee" if precision == "float32" else "bf16")
        results.append([out, *(tensor.grad for tensor in inputs)])
    for full, reduced in zip(*results, strict=True):
        assert torch.equal(full, reduced)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "classic"])
def test_a_rounded_feed_forward_layer_equals_the_exact_one_within_its_precision(
    family, monkeypatch
):
    monkeypatch.setattr(precision_module, "_has_amx", lambda: False)
    torch.manual_seed(0)
    config = ModelConfig.of(family, n_layers=1, n_heads=2, d_model=64, vocab_size=300)
    layer = FeedForward(config, Dropout(0.0))
    x, grad = torch.randn(2, 2, 40, 64)
    results = []
    for precision in ("float32", "bfloat16"):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with product_precision(precision):
            out = layer(leaf)
            out.backward(grad)
        assert out.dtype == leaf.grad.dtype == torch.float32
        gradients = [parameter.grad.clone() for parameter in layer.parameters()]
        results.append([out.detach(), leaf.grad, *gradients])
    for exact, reduced in zip(*results, strict=True):
        assert 1e-5 < error(reduced, exact) < 4e-2  # the slope of ReLU jumps
