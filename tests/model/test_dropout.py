"""Dropout: its share, its scale, and masks that depend on the sequence alone."""

import pytest
import torch

from tgen.model.dropout import Dropout


def dropped(x, p, seeds):
    dropout = Dropout(p).train()
    dropout.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return dropout(x)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_the_share_and_the_scale_are_those_of_the_probability(p):
    out = dropped(torch.ones(2, 400, 251), p, [1, 2])
    share = (out == 0).double().mean().item()
    assert share == pytest.approx(p, abs=4 * (p * (1 - p) / out.numel()) ** 0.5)
    assert out[out != 0].unique().tolist() == pytest.approx([1 / (1 - p)], rel=1e-4)
    assert out.mean().item() == pytest.approx(1, abs=0.01)


def test_a_sequence_has_the_same_mask_in_any_batch():
    x = torch.randn(3, 7, 5)  # sizes that 4 does not divide
    together = dropped(x, 0.4, [1, 2, 3])
    for i in range(3):
        assert torch.equal(dropped(x[i : i + 1], 0.4, [i + 1])[0], together[i])
    assert not torch.equal(together[0] == 0, together[1] == 0)


def test_masks_do_not_repeat_within_a_sequence():
    zeros = (dropped(torch.ones(1, 64, 64), 0.5, [1]) == 0).flatten()
    for lag in (1, 2, 3, 4, 64):
        same = (zeros[lag:] == zeros[:-lag]).double().mean().item()
        assert same == pytest.approx(0.5, abs=0.04)
