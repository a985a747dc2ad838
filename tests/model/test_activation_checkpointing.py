"""Blocks that are computed again: with the same dropout masks."""

import pytest
import torch

from tgen.model.activation_checkpointing import checkpoint_block
from tgen.model.dropout import Dropout


class OnMac(torch.Tensor):
    """A tensor that says it is on a Mac's GPU, whose masks torch's checkpoint does not repeat."""

    device = torch.device("mps")


@pytest.mark.parametrize("source", ["per sequence", "torch's own", "a Mac's GPU"])
def test_a_block_that_is_computed_again_has_the_same_masks(monkeypatch, source):
    x, weight, mps = torch.randn(2, 5, 8), torch.randn(8, 8), torch.Generator()
    if source == "a Mac's GPU":
        x = x.as_subclass(OnMac)
        monkeypatch.setattr(torch.mps, "get_rng_state", mps.get_state)
        monkeypatch.setattr(torch.mps, "set_rng_state", mps.set_state)
        on_mac = lambda x, p: x * torch.rand(x.shape, generator=mps).ge(p)  # noqa: E731
        monkeypatch.setattr(torch.nn.functional, "dropout", on_mac)

    def gradient(run) -> torch.Tensor:
        dropout = Dropout(0.5).train()
        torch.manual_seed(3)
        mps.manual_seed(3)
        if source == "per sequence":
            dropout.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        inputs = x.clone().requires_grad_()

        def block(x: torch.Tensor, context: None) -> torch.Tensor:
            del context
            return dropout(dropout(x @ weight).relu() @ weight)

        run(block, inputs, dropout).sum().backward()
        assert inputs.grad is not None
        return inputs.grad

    once = gradient(lambda block, x, _: block(x, None))
    again = gradient(lambda block, x, dropout: checkpoint_block(block, x, None, dropout))
    torch.testing.assert_close(again, once)
