"""R-Drop: the loss of windows that are computed twice against its definition."""

import pytest
import torch
import torch.nn.functional as F

from support.models import make_model
from tgen.training import consistency
from tgen.training.consistency import consistency_loss
from tgen.training.loss import DeviceBatch, LossModule

STRENGTH = 1.7


def defined(x, head, targets, loss_mask=None):
    """The loss as in equation 3 of Liang et al. (2021), as a mean of the two predictions."""
    p, q = (F.log_softmax(one @ head.T, -1) for one in x)
    nats = (F.nll_loss(p, targets, reduction="none") + F.nll_loss(q, targets, reduction="none")) / 2
    kl = [F.kl_div(a, b, log_target=True, reduction="none").sum(-1) for a, b in ((p, q), (q, p))]
    nats = nats + STRENGTH * (kl[0] + kl[1]) / 2
    return nats.sum() if loss_mask is None else nats[loss_mask].sum()


@pytest.mark.parametrize("share", [None, 0.5, 0.0])
def test_loss_and_its_gradients_are_those_of_the_definition(monkeypatch, share):
    monkeypatch.setattr(consistency, "_CHUNK", 50)  # several chunks, the last one shorter
    monkeypatch.setattr(consistency, "_MIN_ROWS", 30)
    torch.manual_seed(0)
    x = torch.randn(2, 70, 16, dtype=torch.float64, requires_grad=True)
    head = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (70,))
    loss_mask = None if share is None else torch.rand(70) < share
    wanted = defined(x, head, targets, loss_mask)
    got = consistency_loss(x, head, targets, loss_mask, strength=STRENGTH)
    assert got.item() == pytest.approx(wanted.item(), abs=1e-9)
    gradients = torch.autograd.grad(got * 3, (x, head))
    for ours, theirs in zip(gradients, torch.autograd.grad(wanted * 3, (x, head)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_windows_are_computed_twice_in_training_and_once_in_an_evaluation():
    model = make_model("qwen3").double()
    model.dropout.p = 0.3
    torch.manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (3, 17))
    mask = torch.rand(3, 16) < 0.7
    documents = torch.arange(16).expand(3, 16) // 5
    batch = DeviceBatch(tokens, mask, documents)
    module, plain = LossModule(model, consistency=STRENGTH), LossModule(model)
    model.eval()
    assert module(batch).item() == plain(batch).item()
    model.train()
    both = []
    for half in (0, 3):
        model.dropout.generators = [torch.Generator().manual_seed(half + i) for i in range(3)]
        hidden = model.hidden_states(tokens[:, :-1], documents=documents)
        both.append(hidden.flatten(0, 1))
    model.dropout.generators = [torch.Generator().manual_seed(i) for i in range(6)]
    wanted = defined(
        torch.stack(both), model.output_weight, tokens[:, 1:].flatten(), mask.flatten()
    )
    assert module(batch).item() == pytest.approx(wanted.item(), abs=1e-9)
