"""The hyperparameters of fine-tuning, by model size and rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig, TrainConfig
from tgen.errors import UsageError
from tgen.planning.costs import FrozenModel, matmul_params
from tgen.planning.fine_tuning import learning_rate, max_epochs, rows_per_step
from tgen.planning.memory import activation_bytes, check_memory, peak_bytes
from tgen.planning.model_size import PlanInputs
from tgen.planning.plan import Plan, make_plan
from tgen.training.optimizers import Muon, orthogonalize_parts
from tgen.training.schedule import lr_factor, update_schedule
from tgen.training.state import Progress

MODEL = ModelConfig.of("llama", vocab_size=1024, n_layers=4, d_model=64, n_heads=2,
                       context_length=2048)  # fmt: skip
WINDOW = 512


def plan(train_tokens: int, train: TrainConfig | None = None, **values: Any) -> Plan:
    defaults = dict(has_merges=True, flops_per_second=1e15, on_cpu=True, vocab_size=1024)
    inputs = PlanInputs(
        train_tokens=train_tokens, val_tokens=train_tokens // 9, **defaults | values
    )
    return make_plan(
        family="qwen3",
        size=None,
        train=train or TrainConfig(),
        model_fields={},
        inputs=inputs,
        start_from=MODEL,
    )


def test_rates_meet_the_published_ones():
    assert learning_rate(1_240_000_000, lora=True) == 1e-3
    assert learning_rate(8_000_000_000, lora=True) == pytest.approx(4e-4, rel=0.02)
    assert learning_rate(135_000_000, lora=True) == 2e-3
    assert learning_rate(1_240_000_000, lora=False) == 1e-4
    assert learning_rate(2_000_000, lora=False) == 3e-4


@pytest.mark.parametrize(
    ("n", "rows", "epochs"), [(50, 4, 12), (500, 8, 4), (5000, 16, 3), (50_000, 32, 2)]
)
def test_rows_per_step_and_epochs_follow_the_table(n, rows, epochs):
    assert rows_per_step(n) == rows
    assert max_epochs(n, has_rows=True, n_parameters=135e6) == pytest.approx(epochs)
    more = max_epochs(n, has_rows=True, n_parameters=1e6)
    assert more == pytest.approx(min(12, epochs * 100**0.25))
    steps = plan(n * 100, train_rows=n).train.max_steps
    few = max_epochs(n, has_rows=True, n_parameters=matmul_params(MODEL))
    assert steps == pytest.approx(n * few / rows, rel=0.3)  # whole windows


@pytest.mark.parametrize(("n", "windows", "steps"), [(50, 4, 125), (500, 8, 250), (5000, 16, 625)])
def test_plain_text_counts_as_windows(n, windows, steps):
    chosen = plan(n * WINDOW)
    assert chosen.context_length == WINDOW
    assert (chosen.train.batch_size, chosen.train.max_steps) == (windows, steps)
    assert chosen.train.eval_every <= n / windows / 2 + 1
    assert chosen.train.warmup_steps == max(5, round(0.05 * steps))
    (shown,) = (choice for choice in chosen.choices if choice.name == "steps")
    assert shown.value == f"at most {steps:,}"


def test_nothing_is_regularized_and_the_source_chooses_the_optimizer():
    for lora in (None, 8):
        train = plan(10_000, TrainConfig(lora=lora)).train
        assert (train.dropout, train.bpe_dropout, train.optimizer) == (0, 0, "adamw")
        assert train.weight_decay == (0 if lora else 0.01)
        assert train.patience == 2
    assert plan(10_000, source_optimizer="muon").train.optimizer == "muon"
    assert plan(10_000, TrainConfig(lora=8), source_optimizer="muon").train.optimizer == "adamw"
    chosen = plan(10_000, TrainConfig(lora=8, optimizer="muon")).train
    assert (chosen.optimizer, chosen.muon_scale) == ("muon", "adamw")
    assert chosen.matrix_learning_rate == chosen.learning_rate == 2e-3


def test_steps_and_minutes_of_the_user_count():
    assert plan(10_000, TrainConfig(steps=7)).train.max_steps is None
    short = plan(10**8, TrainConfig(minutes=0.1), flops_per_second=1e9)
    (shown,) = (choice for choice in short.choices if choice.name == "steps")
    assert shown.value.startswith("about ")


def test_activations_are_computed_again_where_memory_needs_it():
    frozen = FrozenModel(1 << 20, 0, ((8, 64), (64, 8)))

    def again(memory: int | None) -> bool:
        train = TrainConfig(lora=8)
        return plan(10**6, train, memory=memory, frozen=frozen).train.activation_checkpointing

    assert not again(None)
    assert not again(1 << 40)
    config = plan(10**6, TrainConfig(lora=8), frozen=frozen).train
    stored = peak_bytes(MODEL, config, WINDOW, frozen)
    assert again(round(1.9 * stored))
    assert not again(round(2.1 * stored))
    recomputed = replace(config, activation_checkpointing=True)
    kinds = [activation_bytes(MODEL, c, context=WINDOW, on_gpu=False) for c in (recomputed, config)]
    assert kinds[0] < kinds[1]
    check_memory(MODEL, recomputed, WINDOW, stored, frozen=frozen)


def test_ranks_need_memory_for_their_part_of_the_batch():
    def again(n_ranks: int) -> bool:
        config = TrainConfig(batch_size=16 * n_ranks)
        return plan(
            10**6, config, n_ranks=n_ranks, rank_memory=round(2.1 * needed)
        ).train.activation_checkpointing

    needed = peak_bytes(MODEL, plan(10**6, TrainConfig(batch_size=16)).train, WINDOW, None)
    assert not again(1)
    assert not again(8)


@pytest.mark.parametrize("n", [1, 5, 20, 30])
def test_no_more_steps_than_the_maximum(n):
    config = ResolvedTrainConfig(minutes=1e6, max_steps=n, warmup_steps=0)
    progress = Progress()
    while progress.step != progress.total_steps:
        update_schedule(progress, config)
        progress.step += 1
        progress.steps_taken += 1
    assert progress.step == n


def test_rate_of_the_user_has_no_reason_of_the_plan():
    def why(train: TrainConfig) -> str:
        choices = plan(10_000, train).choices
        return next(choice.why for choice in choices if choice.name == "learning rate")

    assert "by the model's size" in why(TrainConfig(optimizer="adamw"))
    assert "size" not in why(TrainConfig(optimizer="adamw", learning_rate=1e-5))


def test_bigram_start_is_not_for_fine_tuning():
    with pytest.raises(UsageError, match="bigram_start=true: fine-tuning starts from the base"):
        plan(10_000, TrainConfig(bigram_start=True))


def test_learning_rate_decays_to_zero_at_the_last_of_the_steps_at_most():
    config = ResolvedTrainConfig(minutes=1e6, max_steps=20, warmup_steps=0)
    progress, factors = Progress(), []
    while progress.step != progress.total_steps:
        progress.steps_taken, progress.seconds = progress.step, 1.0 * progress.step
        update_schedule(progress, config)
        factors.append(lr_factor(progress, config, progress.step))
        progress.step += 1
    assert len(factors) == 20
    assert factors[:14] == [1.0] * 14
    assert factors[13] > factors[14] > factors[19] > 0


@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_muon_moves_numbers_as_far_as_adamw(shape):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    settings: dict[str, Any] = dict(lr=0.5, momentum=0.0, weight_decay=0.0, scale="adamw")
    muon = Muon({parameter: shape[:1]}, orthogonalize=orthogonalize_parts, **settings)
    parameter.grad = torch.randn(shape)
    muon.step()
    rms = parameter.detach().square().mean().sqrt()
    assert rms == pytest.approx(0.5 * 0.2, rel=0.2)


def test_evaluations_of_a_slow_model_use_a_part_of_the_held_out_text():
    slow, train = {"flops_per_second": 1e9}, TrainConfig(minutes=1.5)
    shown = plan(90_000, train, **slow)
    assert shown.evaluated_tokens is not None
    assert shown.train.eval_tokens == shown.evaluated_tokens < 10_000
    assert any("held-out tokens; all would take too long" in note for note in shown.notes)
    shorter = plan(90_000, train, **slow, train_rows=900)  # without memorization
    assert shorter.closing_seconds < shown.closing_seconds <= 0.3 * 90  # six of 5%
    with_steps = plan(90_000, TrainConfig(steps=5), **slow)
    assert with_steps.evaluated_tokens is None
    assert not any("too long" in note for note in with_steps.notes)
