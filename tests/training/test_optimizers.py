"""Muon and AdamW against their definitions."""

import subprocess
import sys
from typing import Any

import torch

from tgen.training.optimizers import AdamW, Muon, orthogonalize, orthogonalize_parts


def test_muon_update_is_nearly_orthogonal():
    torch.manual_seed(0)
    for shape in ((16, 64), (64, 16)):
        singular = torch.linalg.svdvals(orthogonalize(torch.randn(3, *shape)))
        assert singular.min() > 0.6
        assert singular.max() < 1.3


def test_muon_is_orthogonalized_nesterov_momentum_with_decoupled_weight_decay():
    torch.manual_seed(0)
    parts: dict[tuple[int, ...], tuple[int, ...]] = {
        (6, 4): (6,),
        (4, 6): (4,),
        (12, 4): (6, 3, 3),
        (12, 5): (4, 4, 4),
    }
    shapes = ((6, 4), (6, 4), (4, 6), (12, 4), (12, 5))
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    expected = [matrix.detach().clone() for matrix in matrices]
    momenta = [torch.zeros_like(matrix) for matrix in expected]
    optimizer = Muon(
        {matrix: parts[tuple(matrix.shape)] for matrix in matrices},
        lr=0.1,
        momentum=0.9,
        weight_decay=0.5,
        orthogonalize=orthogonalize_parts,
    )
    for _ in range(3):
        for i, matrix in enumerate(matrices):
            matrix.grad = torch.randn_like(matrix)
            momenta[i] = 0.9 * momenta[i] + 0.1 * matrix.grad
            nesterov = 0.1 * matrix.grad + 0.9 * momenta[i]
            update = [
                orthogonalize(rows[None])[0] * max(1, len(rows) / rows.shape[1]) ** 0.5
                for rows in nesterov.split(parts[tuple(matrix.shape)])
            ]
            expected[i] = expected[i] * (1 - 0.1 * 0.5) - 0.1 * torch.cat(update)
        optimizer.step()
    for matrix, wanted in zip(matrices, expected, strict=True):
        assert torch.allclose(matrix, wanted, atol=1e-5)


def adamw_parameters() -> tuple[list[torch.nn.Parameter], list[dict[str, Any]]]:
    """Return parameters and their groups."""
    torch.manual_seed(0)
    some = [torch.nn.Parameter(torch.randn(*shape)) for shape in ((5, 3), (7,), (2,))]
    decayed = {"params": some[:1], "lr": 0.1, "weight_decay": 0.3}
    return some, [decayed, {"params": some[1:], "lr": 0.1, "weight_decay": 0.0}]


def test_adamw_equals_torch_bit_for_bit():
    (ours, our_groups), (theirs, their_groups) = adamw_parameters(), adamw_parameters()
    mine = AdamW(our_groups, beta1=0.8, beta2=0.9)
    gradients = [[torch.randn_like(p) for p in ours[:2]] for _ in range(5)]

    def take(optimizer, parameters):
        for step, gradient in enumerate(gradients):
            for parameter, grad in zip(parameters[:2], gradient, strict=True):  # the last has none
                parameter.grad = grad.clone()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            yield torch.tensor(float(step == 2))

    for found_inf in take(mine, ours):
        mine.step(found_inf=found_inf)
    torchs: Any = torch.optim.AdamW(their_groups, betas=(0.8, 0.9), fused=True)
    for found_inf in take(torchs, theirs):
        torchs.found_inf = found_inf
        torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert mine.state.get(a, {}).keys() == torchs.state.get(b, {}).keys()
        assert all(torch.equal(mine.state[a][k], torchs.state[b][k]) for k in mine.state.get(a, {}))
    assert not torch.equal(ours[0], adamw_parameters()[0][0])


def test_adamw_does_not_import_torchs_compiler():
    script = """
import sys, torch
from tgen.training.optimizers import AdamW
parameter = torch.nn.Parameter(torch.ones(5, 3))
optimizer = AdamW([{"params": [parameter], "lr": 0.1, "weight_decay": 0.3}], beta1=0.8, beta2=0.9)
parameter.grad = torch.ones(5, 3)
optimizer.step(found_inf=torch.tensor(0.0))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
