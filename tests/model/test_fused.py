"""Elementwise functions for training on a CPU equal torch's, and so do their gradients."""

from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F

from tgen.config.training import Precision
from tgen.model import fused
from tgen.model.precision import product_precision


def test_rms_norm_equals_torchs():
    torch.manual_seed(0)
    for shape in ((5, 7, 3, 32), (4, 64), (2, 3, 96)):
        x, grad = torch.randn(2, *shape, dtype=torch.float64)
        weight = torch.randn(shape[-1], dtype=torch.float64)
        results = []
        for ours in (True, False):
            x, weight = (tensor.detach().clone().requires_grad_() for tensor in (x, weight))
            theirs = F.rms_norm(x, weight.shape, weight, 1e-6)
            out = fused.rms_norm(x, weight, 1e-6) if ours else theirs
            out.backward(grad)
            results.append([out, x.grad, weight.grad])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_gradients_of_rms_norm_are_not_rounded_with_products():
    torch.manual_seed(0)
    x, grad = torch.randn(2, 64, 192)
    weight = torch.randn(192)
    gradients = []
    for precision in get_args(Precision):
        leaf = x.clone().requires_grad_()
        with product_precision(precision):
            fused.rms_norm(leaf, weight, 1e-6).backward(grad)
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_rotation_turns_pairs_by_their_angles_and_gradients_back():
    torch.manual_seed(0)
    x, grad = torch.randn(2, 3, 4, 6, 8, dtype=torch.float64)
    angles = torch.randn(6, 4, dtype=torch.float64)
    tables = angles.cos(), angles.sin()

    def turn(x, direction):
        turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles * direction)
        return torch.cat([turned.real, turned.imag], -1)

    x.requires_grad_()
    out = fused.rotate(x, *tables)
    out.backward(grad)
    torch.testing.assert_close(out, turn(x, 1))
    torch.testing.assert_close(x.grad, turn(grad, -1))
    with torch.no_grad():
        torch.testing.assert_close(fused.rotate(x, *tables), out)
        part = fused.rotate(x, tables[0][:, :2], tables[1][:, :2])
    torch.testing.assert_close(part[..., 4:], x[..., 4:].detach())


def test_gelu_tanh_equals_torchs():
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x, grad = torch.randn(2, 5, 700, dtype=dtype) * 4
        x[0, :5] = torch.tensor([-40.0, -8.0, 0.0, 8.0, 40.0])
        results = []
        for function in (fused.gelu_tanh, partial(F.gelu, approximate="tanh")):
            leaf = x.clone().requires_grad_()
            out = function(leaf)
            out.backward(grad)
            results.append([out, leaf.grad])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
