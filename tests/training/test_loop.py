"""The loop, the schedule, the optimizer and the plan, against their definitions."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from tgen.config import ModelConfig, TrainConfig
from tgen.corpus import TokenDataset
from tgen.errors import UsageError
from tgen.model.transformer import Transformer
from tgen.reports import StepReport
from tgen.training.evaluation import LossModule, evaluate
from tgen.training.loop import train
from tgen.training.optimizers import Muon, orthogonalize, rate_factor
from tgen.training.plan.model_size import PlanInputs
from tgen.training.plan.plan import make_plan
from tgen.training.state import TrainState


def test_bits_per_byte_are_those_of_the_definition():
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig.of("qwen3", vocab_size=40, n_layers=1, d_model=16, n_heads=2, context_length=8)
    )
    tokens = np.random.default_rng(0).integers(0, 40, 60).astype(np.uint16)
    store = TokenDataset(
        train=tokens[:30],
        held_out=tokens[30:],
        held_out_bytes=100,
        context_length=8,
        batch_size=1,
        seed=0,
    )
    nats = 0.0
    for start in range(29, 59, 8):
        window = torch.tensor(tokens[start : start + 9].astype(np.int64))[None]
        with torch.no_grad():
            log_p = model(window[:, :-1]).double().log_softmax(-1)
        nats -= log_p.gather(-1, window[:, 1:, None]).sum().item()
    loss, bits, _ = evaluate(LossModule(model), store)
    assert loss == pytest.approx(nats / 30, rel=1e-5)
    assert bits == pytest.approx(nats / np.log(2) / 100, rel=1e-5)


def test_minutes_end_in_time_and_the_decay_is_recorded():
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5  # a step asks four times: two seconds
        return now

    config = TrainConfig(minutes=2, batch_size=2, eval_every=1000, decay_fraction=0.25)
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig.of("qwen3", vocab_size=40, n_layers=1, d_model=16, n_heads=2, context_length=8)
    )
    store = TokenDataset(
        train=np.arange(40, dtype=np.uint16),
        held_out=np.zeros(0, np.uint16),
        held_out_bytes=0,
        context_length=8,
        batch_size=2,
        seed=0,
    )
    state = TrainState(model, config)
    steps = [
        r for r in train(model, store, config, state, clock=clock) if isinstance(r, StepReport)
    ]
    assert 114 <= state.progress.seconds <= 126
    assert state.progress.decay_start == pytest.approx(0.75 * len(steps), abs=2)
    assert state.progress.total_steps == len(steps)
    rates = [r.learning_rate for r in steps]
    assert max(rates) == pytest.approx(config.learning_rate)
    assert rates[-1] < 0.1 * config.learning_rate
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[50:]))


def test_the_rate_goes_up_level_and_down():
    factors = [rate_factor(s, warmup_steps=3, decay_start=6, total_steps=10) for s in range(11)]
    assert factors[:7] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8])
    assert factors[6:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0])
    assert rate_factor(99, warmup_steps=0, decay_start=None, total_steps=None) == 1


def test_muons_update_is_nearly_orthogonal():
    torch.manual_seed(0)
    for shape in ((16, 64), (64, 16)):
        singular = torch.linalg.svdvals(orthogonalize(torch.randn(3, *shape)))
        assert singular.min() > 0.6
        assert singular.max() < 1.3


def test_muon_is_orthogonalised_nesterov_momentum_with_decoupled_decay():
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (6, 4), (4, 6))]
    expected = [matrix.detach().clone() for matrix in matrices]
    momenta = [torch.zeros_like(matrix) for matrix in expected]
    optimizer = Muon(matrices, lr=0.1, momentum=0.9, weight_decay=0.5, orthogonalise=orthogonalize)
    for _ in range(3):
        for i, matrix in enumerate(matrices):
            matrix.grad = torch.randn_like(matrix)
            momenta[i] = 0.9 * momenta[i] + 0.1 * matrix.grad
            update = orthogonalize((0.1 * matrix.grad + 0.9 * momenta[i])[None])[0]
            scale = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
            expected[i] = expected[i] * (1 - 0.1 * 0.5) - 0.1 * scale * update
        optimizer.step()
    for matrix, wanted in zip(matrices, expected, strict=True):
        assert torch.allclose(matrix, wanted, atol=1e-5)


def test_adamw_is_torchs_bit_for_bit_and_does_not_import_its_compiler():
    script = """
import sys, torch
from tgen.training.optimizers import AdamW
def tensors():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7)),
            torch.nn.Parameter(torch.randn(2))]
ours, theirs = tensors(), tensors()
def groups(parameters):
    return [{"params": parameters[:1], "lr": 0.1, "weight_decay": 0.3},
            {"params": parameters[1:], "lr": 0.1, "weight_decay": 0.0}]
mine = AdamW(groups(ours), beta1=0.8, beta2=0.9)
gradients = [[torch.randn_like(p) for p in ours[:2]] for _ in range(5)]
def take(optimizer, parameters):
    for step, gradient in enumerate(gradients):
        for parameter, grad in zip(parameters, gradient):  # the last one has none
            parameter.grad = grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        yield torch.tensor(float(step == 2))
for found_inf in take(mine, ours):
    mine.step(found_inf=found_inf)
assert "torch._dynamo" not in sys.modules
torchs = torch.optim.AdamW(groups(theirs), betas=(0.8, 0.9), fused=True)
for torchs.found_inf in take(torchs, theirs):
    torchs.step()
for a, b in zip(ours, theirs):
    assert torch.equal(a, b)
    assert mine.state.get(a, {}).keys() == torchs.state.get(b, {}).keys()
    assert all(torch.equal(mine.state[a][k], torchs.state[b][k]) for k in mine.state.get(a, {}))
assert not torch.equal(ours[0], tensors()[0])
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_overrides_reach_every_field_and_refuse_the_rest():
    plan_of = dict(
        family="llama",
        size="tiny",
        train=TrainConfig(),
        facts=PlanInputs(
            vocab_size=300,
            train_tokens=10_000,
            held_out_tokens=1000,
            splittable=False,
            speed=1e10,
        ),
    )
    plan = make_plan(
        **plan_of,
        overrides={
            "n_kv_heads": "2",
            "tied_embeddings": "false",
            "beta2": "0.9",
            "warmup_steps": "7",
            "norm_eps": "1e-4",
        },
    )
    assert plan.model.n_kv_heads == 2
    assert plan.model.tied_embeddings is False
    assert (plan.train.beta2, plan.train.warmup_steps) == (0.9, 7)
    for name, value in [
        ("layers", "3"),
        ("n_layers", "many"),
        ("n_layers", "-1"),
        ("tied_embeddings", "maybe"),
        ("activation", "tanh"),
        ("activation", "relu"),
        ("learning_rate", "nan"),
        ("vocab_size", "9"),
        ("steps", "7"),
    ]:
        with pytest.raises(UsageError):
            make_plan(**plan_of, overrides={name: value})
