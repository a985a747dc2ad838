"""Intervals hold what they promise for the few trials that a benchmark has."""

import math
from itertools import combinations, product

import numpy as np
import pytest

from tgen.benchmark import statistics
from tgen.benchmark.statistics import bootstrap, doubts, hodges_lehmann, paired_ratio, ratio, timing


def times(random, n, scale=1.0):
    """As trials are: a spread of some percent, and now and then one that something else slowed."""
    return scale * random.lognormal(0, 0.05, n) * (1 + (random.random(n) < 0.1) * random.random(n))


@pytest.mark.parametrize("n", [8, 12, 20])
@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_coverage_of_small_samples(n, confidence):
    random, rounds = np.random.default_rng(n), 2000
    held = {"paired": 0, "apart": 0}
    for _ in range(rounds):
        drift = random.lognormal(0, 0.3)  # of the machine, the same for both of a pair
        a, b = times(random, n), times(random, n, 1.1)
        found = paired_ratio((a * drift).tolist(), (b * drift).tolist(), confidence=confidence)
        held["paired"] += found.low <= 1.1 <= found.high
        found = ratio(a.tolist(), b.tolist(), confidence=confidence)
        held["apart"] += found.low <= 1.1 <= found.high
    sure = 3 * math.sqrt(confidence * (1 - confidence) / rounds)
    for share in (count / rounds for count in held.values()):
        assert share >= confidence - sure
        assert share <= confidence + 0.03  # nor are they wider than they must be


@pytest.mark.parametrize(("confidence", "paired", "apart"), [(0.95, 6, 4), (0.99, 8, 5)])
def test_too_few_trials_have_no_interval(confidence, paired, apart):
    for n, known in [(paired - 1, False), (paired, True)]:
        found = hodges_lehmann(list(range(1, n + 1)), confidence=confidence)
        assert (math.isfinite(found.high), found.low > 0) == (known, known)
    for n, known in [(apart - 1, False), (apart, True)]:
        found = ratio(list(range(1, n + 1)), list(range(2, n + 2)), confidence=confidence)
        assert (math.isfinite(found.high), found.low > 0) == (known, known)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_chances_are_those_of_counting(n):
    sums = [sum(i + 1 for i, sign in enumerate(s) if sign) for s in product([0, 1], repeat=n)]
    counted = np.bincount(sums, minlength=n * (n + 1) // 2 + 1) / 2**n
    assert np.allclose(statistics._signed_rank_sums(n), counted)
    for m in (1, 3, 4):
        places = combinations(range(n + m), n)
        above = [sum(p for p in chosen) - n * (n - 1) // 2 for chosen in places]
        counted = np.bincount(above, minlength=n * m + 1) / math.comb(n + m, n)
        assert np.allclose(statistics._rank_sums(n, m), counted)


def test_many_trials_are_counted_as_few_are(monkeypatch):
    x = times(np.random.default_rng(0), 50).tolist()
    y = times(np.random.default_rng(1), 10).tolist()
    exact = hodges_lehmann(x, confidence=0.99), ratio(x, y, confidence=0.99)
    monkeypatch.setattr(statistics, "_EXACT", 1)
    statistics._signed_rank_sums.cache_clear()
    statistics._rank_sums.cache_clear()
    near = hodges_lehmann(x, confidence=0.99), ratio(x, y, confidence=0.99)
    statistics._signed_rank_sums.cache_clear()
    statistics._rank_sums.cache_clear()
    for a, b in zip(exact, near, strict=True):
        assert (a.low, a.middle, a.high) == pytest.approx((b.low, b.middle, b.high), rel=0.01)


def test_ratios_turn_around_and_a_slow_trial_moves_nothing_far():
    a, b = [1.0, 1.01, 0.99, 1.02, 1.0, 0.98, 1.0, 1.01], [2.0, 2.02, 2.0, 2.1, 1.9, 2.0, 2.0, 2.01]
    for of in (paired_ratio, ratio):
        there, back = of(a, b, confidence=0.95), of(b, a, confidence=0.95)
        assert there.middle == pytest.approx(2, rel=0.02)
        assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))
        slow = of(a, [*b[:-1], 20.0], confidence=0.95)
        assert slow.middle == pytest.approx(there.middle, rel=0.05)


def test_a_bootstrap_of_many_values_is_the_means_normal_interval():
    x = np.random.default_rng(0).normal(10, 1, 400)
    found = bootstrap(x.tolist())
    half = 1.96 * x.std() / 20
    assert found.middle == pytest.approx(x.mean())
    assert (found.low, found.high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.02)
    assert bootstrap([3.0]).low == bootstrap([3.0]).high == 3
    # Of eight it holds less often than it says: it is not what differences are told by.
    random, held = np.random.default_rng(1), 0
    for _ in range(500):
        one = bootstrap(random.lognormal(0, 0.5, 8).tolist())
        held += one.low <= math.exp(0.125) <= one.high
    assert held / 500 < 0.93


def test_medians_and_doubts():
    found = timing([1, 2, 3, 4, 100])
    assert (found.median, found.low) == (3, pytest.approx(1.4))
    assert doubts([1.0, 1.02, 0.99, 1.0]) == []
    assert "first trial took 2.0 times" in doubts([2.0, 1.0, 1.0, 1.01, 1.0])[0]
    assert "1 of 6 trials" in doubts([1, 1, 1.01, 0.99, 5, 1])[0]
    assert "too short" in doubts([1e-4] * 5)[0]
    assert doubts([1.0]) == doubts([]) == []
