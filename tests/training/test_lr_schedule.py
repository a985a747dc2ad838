"""The learning-rate schedule."""

import pytest

from tgen.config.training import ResolvedTrainConfig
from tgen.training.schedule import lr_factor, update_schedule
from tgen.training.state import Progress


def test_learning_rate_warms_up_stays_and_decays():
    config, progress = ResolvedTrainConfig(warmup_steps=3), Progress(decay_start=6, total_steps=10)
    factors = [lr_factor(progress, config, step) for step in range(11)]
    assert factors[:7] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8])
    assert factors[6:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0])
    assert lr_factor(Progress(), ResolvedTrainConfig(warmup_steps=0), 99) == 1
    halved = Progress(learning_rate_scale=0.5)
    assert lr_factor(halved, ResolvedTrainConfig(warmup_steps=0), 99) == 0.5


def test_slower_machine_takes_fewer_steps():
    config = ResolvedTrainConfig(minutes=1)
    progress = Progress(step=100, steps_taken=100, seconds=44, decay_start=90, total_steps=140)
    update_schedule(progress, config)
    assert progress.total_steps == 134  # 16 seconds, 0.9 of them to exit, at 0.44 per step
    on_time = Progress(step=100, steps_taken=100, seconds=40, decay_start=90, total_steps=140)
    update_schedule(on_time, config)
    assert on_time.total_steps == 140
