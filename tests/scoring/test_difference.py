"""The paired difference of two models, and its p-value by definition and by simulation."""

from itertools import product

import numpy as np
import pytest

from tgen.scoring.significance import compare, permutation_p_value
from tgen.scoring.totals import Units


def test_p_value_is_the_share_of_signs_with_as_large_a_sum():
    random = np.random.default_rng(0)
    for n in (1, 5, 10):
        differences = random.normal(0.3, 1, n)
        sums = [abs(np.dot(signs, differences)) for signs in product((-1, 1), repeat=n)]
        expected = np.mean(np.array(sums) >= abs(differences.sum()) - 1e-12)
        assert permutation_p_value(differences) == pytest.approx(expected)
    assert permutation_p_value(np.ones(10)) == 2 / 2**10
    assert permutation_p_value(np.zeros(10)) == 1


def test_normal_approximation_continues_the_exact_values():
    differences = np.random.default_rng(1).normal(0.4, 1, 20)
    exact = permutation_p_value(differences)
    assert permutation_p_value(np.append(differences, 0)) == pytest.approx(exact, abs=0.02)


def test_equally_good_models_differ_significantly_as_often_as_stated():
    random = np.random.default_rng(2)
    for n in (12, 200):
        p_values = [permutation_p_value(random.normal(0, 1, n)) for _ in range(400)]
        assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.03)


def test_paired_error_is_smaller_than_those_of_the_models():
    random = np.random.default_rng(3)
    n_bytes = random.integers(50, 150, 40).astype(float)
    nats = n_bytes * random.uniform(1, 2, 40)
    one = Units("documents", nats, n_bytes)
    other = Units("documents", nats * random.normal(1.05, 0.01, 40), n_bytes)
    difference = compare(one, other)
    expected = (one.nats.sum() - other.nats.sum()) / np.log(2) / n_bytes.sum()
    assert difference.bits_per_byte == pytest.approx(expected)
    assert difference.bits_per_byte < 0
    assert difference.standard_error < one.standard_error / 5
    assert difference.is_significant
    few = compare(*(Units("blocks", unit.nats[:9], n_bytes[:9]) for unit in (one, other)))
    assert few.p_value is few.standard_error is None
    assert not few.is_significant
