"""The chunked loss and micro-batches against the plain loss of the whole batch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.corpus import TokenDataset, Tokens
from tgen.model.transformer import Transformer
from tgen.training import loss as loss_module
from tgen.training.loop import train
from tgen.training.loss import cross_entropy, loss_and_derivatives
from tgen.training.state import TrainState


@pytest.mark.parametrize("share", [None, 0.5, 0.0])
def test_cross_entropy_and_its_gradients_equal_torch(monkeypatch, share):
    monkeypatch.setattr(loss_module, "_CHUNK", 50 * 30)  # several chunks, the last one shorter
    torch.manual_seed(0)
    x = torch.randn(70, 16, dtype=torch.float64, requires_grad=True)
    head = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (70,))
    loss_mask = None if share is None else torch.rand(70) < share
    nats = F.cross_entropy(x @ head.T, targets, reduction="none")
    wanted = nats.sum() if loss_mask is None else nats[loss_mask].sum()
    got = cross_entropy(x, head, targets, loss_mask)
    assert got.item() == pytest.approx(wanted.item(), abs=1e-9)
    gradients = torch.autograd.grad(got * 3, (x, head))
    for ours, theirs in zip(gradients, torch.autograd.grad(wanted * 3, (x, head)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    with torch.no_grad():
        assert cross_entropy(x, head, targets, loss_mask).item() == pytest.approx(got.item())


@pytest.mark.parametrize("share", [None, 0.5])
def test_derivatives_of_the_loss_by_the_scale_equal_autograds(monkeypatch, share):
    monkeypatch.setattr(loss_module, "_MIN_ROWS", 32)  # several chunks
    monkeypatch.setattr(loss_module, "_CHUNK", 50)
    torch.manual_seed(0)
    x, head = torch.randn(70, 16, dtype=torch.float64), torch.randn(50, 16, dtype=torch.float64)
    targets = torch.randint(0, 50, (70,))
    loss_mask = None if share is None else torch.rand(70) < share
    scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    loss = cross_entropy(scale * x, head, targets, loss_mask)
    sums = loss_and_derivatives(x, head, targets, loss_mask, logit_scale=0.8)
    assert sums[0].item() == pytest.approx(loss.item(), abs=1e-9)
    nats = F.cross_entropy(scale * (x @ head.T), targets, reduction="none")
    nats = nats.sum() if loss_mask is None else nats[loss_mask].sum()
    (slope,) = torch.autograd.grad(nats, scale, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, scale)
    torch.testing.assert_close(sums[1:3], torch.stack([slope.detach(), curvature]))


def test_a_stored_bfloat16_head_is_widened_not_rounded_to():
    torch.manual_seed(0)
    x, targets = torch.randn(20, 16) * 9, torch.randint(0, 50, (20,))
    head = torch.randn(50, 16).bfloat16()
    with torch.no_grad():
        expected = cross_entropy(x, head, targets).item()
    assert loss_and_derivatives(x, head, targets)[0].item() == pytest.approx(expected, rel=1e-6)


def test_greedy_decoding_takes_the_first_of_equal_logits():
    x, head = torch.ones(2, 1), torch.tensor([[0.0], [1.0], [1.0]])
    for target, n_others in ((0, 2), (1, 0), (2, 2)):
        targets = torch.tensor([target, target])
        assert loss_and_derivatives(x, head, targets)[3] == n_others


def test_loss_is_finite_where_a_probability_underflows():
    x = torch.tensor([[1000.0, -1000.0]])
    assert cross_entropy(x, torch.eye(2), torch.tensor([1])).item() == pytest.approx(2000)


@pytest.mark.parametrize("n", [64, 100, 128, 300])
def test_losses_are_added_in_the_order_of_earlier_runs(n):
    """A run that resumes has the bits of an uninterrupted one, whichever version began it."""
    x, head, targets = torch.randn(n, 8), torch.randn(70, 8), torch.randint(70, (n,))
    logits = x @ head.T
    logits = logits - logits.amax(1, keepdim=True)
    wanted, exp = logits.gather(1, targets[:, None]), logits.exp()
    total = exp.sum(1, keepdim=True)
    mean = exp.mul_(logits).sum(1, keepdim=True) / total
    square = exp.mul_(logits).sum(1, keepdim=True) / total
    rows = torch.cat([total.log() - wanted, mean - wanted, square - mean**2], 1)
    sums = loss_and_derivatives(x, head, targets)
    assert torch.equal(sums[:3], rows.sum(0))
    assert sums[3] == (logits.argmax(1) != targets).sum()


def test_micro_batches_train_the_same():
    tokens = np.random.default_rng(0).integers(2, 40, 300).astype(np.uint16)
    loss_mask = np.random.default_rng(1).random(300) < 0.3
    ends = []
    for accumulation in (1, 3):
        config = ResolvedTrainConfig(
            steps=4, batch_size=4, accumulation=accumulation, eval_every=100, optimizer="adamw"
        )
        torch.manual_seed(0)
        shape = dict(vocab_size=40, n_layers=1, d_model=16, n_heads=2, context_length=8)
        state = TrainState(Transformer(ModelConfig.of("qwen3", **shape)).double(), config)
        store = TokenDataset(
            train=Tokens(tokens, loss_mask),
            val=Tokens(tokens[:0]),
            val_bytes=0,
            context_length=8,
            batch_size=4,
            seed=0,
        )
        losses = [getattr(r, "loss", None) for r in train(state.model, store, config, state)]
        ends.append((losses, state.own_arrays()))
    assert ends[0][0][:-1] == pytest.approx(ends[1][0][:-1], abs=1e-9)
    for name, array in ends[0][1].items():
        assert np.allclose(array, ends[1][1][name], atol=1e-9), name
