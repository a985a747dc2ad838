"""Confidence intervals over seeds: Student's t, and their coverage."""

import math

import numpy as np
import pytest

from tgen.experiments.intervals import mean_interval, student_t


def test_quantiles_are_those_of_the_tables():
    tables = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 30: 2.0423}
    for freedom, t in tables.items():
        assert student_t(freedom) == pytest.approx(t, abs=1e-4)


def test_interval_is_the_mean_with_its_error():
    one = mean_interval([2.0, 2.2, 2.1])
    assert one.mean == pytest.approx(2.1)
    assert one.half_width == pytest.approx(4.3027 * 0.1 / math.sqrt(3), abs=1e-4)
    assert (one.low, one.high) == (one.mean - one.half_width, one.mean + one.half_width)
    assert one.is_finite


def test_a_single_value_has_no_interval():
    one = mean_interval([2.5])
    assert (one.mean, one.n, one.is_finite) == (2.5, 1, False)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_intervals_cover_the_mean_as_often_as_they_say(n):
    samples = np.random.default_rng(n).normal(2.0, 0.01, (10_000, n)).tolist()
    intervals = map(mean_interval, samples)
    assert 0.93 <= np.mean([one.low <= 2.0 <= one.high for one in intervals]) <= 0.97
