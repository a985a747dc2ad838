"""Confidence intervals have their nominal coverage for few trials."""

import math
from itertools import combinations, product

import numpy as np
import pytest

from tgen.benchmark import statistics
from tgen.benchmark.statistics import (
    bootstrap,
    hodges_lehmann,
    paired_ratio,
    ratio,
    timing,
    timing_warnings,
)


def times(random, n, scale=1.0):
    """Return realistic trials: a spread of a few percent and an occasional outlier."""
    return scale * random.lognormal(0, 0.05, n) * (1 + (random.random(n) < 0.1) * random.random(n))


@pytest.mark.parametrize("n", [8, 12, 20])
@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_coverage_of_small_samples(n, confidence):
    random, rounds = np.random.default_rng(n), 2000
    covered = {"paired": 0, "independent": 0}
    for _ in range(rounds):
        drift = random.lognormal(0, 0.3)  # of the machine, shared by a pair
        a, b = times(random, n), times(random, n, 1.1)
        interval = paired_ratio((a * drift).tolist(), (b * drift).tolist(), confidence=confidence)
        covered["paired"] += interval.low <= 1.1 <= interval.high
        interval = ratio(a.tolist(), b.tolist(), confidence=confidence)
        covered["independent"] += interval.low <= 1.1 <= interval.high
    tolerance = 3 * math.sqrt(confidence * (1 - confidence) / rounds)
    for share in (count / rounds for count in covered.values()):
        assert share >= confidence - tolerance
        assert share <= confidence + 0.03  # and they are not too wide


@pytest.mark.parametrize(("confidence", "paired", "independent"), [(0.95, 6, 4), (0.99, 8, 5)])
def test_too_few_trials_have_an_infinite_interval(confidence, paired, independent):
    for n, known in [(paired - 1, False), (paired, True)]:
        interval = hodges_lehmann(list(range(1, n + 1)), confidence=confidence)
        assert (math.isfinite(interval.high), interval.low > 0) == (known, known)
    for n, known in [(independent - 1, False), (independent, True)]:
        interval = ratio(list(range(1, n + 1)), list(range(2, n + 2)), confidence=confidence)
        assert (math.isfinite(interval.high), interval.low > 0) == (known, known)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_rank_sum_probabilities_equal_enumeration(n):
    sums = [sum(i + 1 for i, sign in enumerate(s) if sign) for s in product([0, 1], repeat=n)]
    counted = np.bincount(sums, minlength=n * (n + 1) // 2 + 1) / 2**n
    assert np.allclose(statistics._signed_rank_sums(n), counted)
    for m in (1, 3, 4):
        subsets = combinations(range(n + m), n)
        above = [sum(p for p in chosen) - n * (n - 1) // 2 for chosen in subsets]
        counted = np.bincount(above, minlength=n * m + 1) / math.comb(n + m, n)
        assert np.allclose(statistics._rank_sums(n, m), counted)


def test_normal_approximation_is_close_to_exact_intervals(monkeypatch):
    x = times(np.random.default_rng(0), 50).tolist()
    y = times(np.random.default_rng(1), 10).tolist()
    exact = hodges_lehmann(x, confidence=0.99), ratio(x, y, confidence=0.99)
    monkeypatch.setattr(statistics, "_MAX_EXACT", 1)
    statistics._signed_rank_sums.cache_clear()
    statistics._rank_sums.cache_clear()
    near = hodges_lehmann(x, confidence=0.99), ratio(x, y, confidence=0.99)
    statistics._signed_rank_sums.cache_clear()
    statistics._rank_sums.cache_clear()
    for a, b in zip(exact, near, strict=True):
        assert (a.low, a.estimate, a.high) == pytest.approx((b.low, b.estimate, b.high), rel=0.01)


def test_ratios_invert_and_are_robust_to_a_slow_trial():
    a, b = [1.0, 1.01, 0.99, 1.02, 1.0, 0.98, 1.0, 1.01], [2.0, 2.02, 2.0, 2.1, 1.9, 2.0, 2.0, 2.01]
    for of in (paired_ratio, ratio):
        there, back = of(a, b, confidence=0.95), of(b, a, confidence=0.95)
        assert there.estimate == pytest.approx(2, rel=0.02)
        assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))
        slow = of(a, [*b[:-1], 20.0], confidence=0.95)
        assert slow.estimate == pytest.approx(there.estimate, rel=0.05)


def test_bootstrap_equals_the_normal_interval_for_many_values():
    x = np.random.default_rng(0).normal(10, 1, 400)
    interval = bootstrap(x.tolist())
    half = 1.96 * x.std() / 20
    assert interval.estimate == pytest.approx(x.mean())
    assert (interval.low, interval.high) == pytest.approx(
        (x.mean() - half, x.mean() + half), abs=0.02
    )
    assert bootstrap([3.0]).low == bootstrap([3.0]).high == 3
    # For eight values its coverage is too low: significance uses rank sums.
    random, covered = np.random.default_rng(1), 0
    for _ in range(500):
        one = bootstrap(random.lognormal(0, 0.5, 8).tolist())
        covered += one.low <= math.exp(0.125) <= one.high
    assert covered / 500 < 0.93


def test_medians_and_warnings():
    interval = timing([1, 2, 3, 4, 100])
    assert (interval.median, interval.p10) == (3, pytest.approx(1.4))
    assert timing_warnings([1.0, 1.02, 0.99, 1.0]) == []
    assert "first trial took 2.0 times" in timing_warnings([2.0, 1.0, 1.0, 1.01, 1.0])[0]
    assert "outliers: 1 of 6 trials" in timing_warnings([1, 1, 1.01, 0.99, 5, 1])[0]
    assert "too short" in timing_warnings([1e-4] * 5)[0]
    assert timing_warnings([1.0]) == timing_warnings([]) == []
