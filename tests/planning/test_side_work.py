"""The work beside the steps: its limits."""

import pytest

from tgen.config.training import TrainConfig
from tgen.planning.side_work import (
    TEXT_TOKENS,
    choose_side_work,
    evaluation_seconds,
    general_seconds,
)


@pytest.mark.parametrize("speed", [1.0, 30.0, 300.0, 3e4])
@pytest.mark.parametrize("minutes", [0.5, 1.5, 10.0])
def test_general_text_takes_at_most_its_share_of_the_minutes(speed, minutes):
    limits = choose_side_work(TrainConfig(minutes=minutes), speed, general_tokens=None)
    n_tokens = limits.general_texts * TEXT_TOKENS
    assert limits.general_tokens == n_tokens
    after = evaluation_seconds(n_tokens, speed)
    assert general_seconds(limits, speed) + after <= 0.05 * 60 * minutes


@pytest.mark.parametrize(("minutes", "n_texts"), [(0.5, 0), (1.5, 32), (10.0, 256)])
def test_number_of_texts_of_a_model_that_trains_on_300_tokens_per_second(minutes, n_texts):
    limits = choose_side_work(TrainConfig(minutes=minutes), 300.0, general_tokens=None)
    assert limits.general_texts == n_texts
