"""The standard error of bits per byte against its definition and by simulation."""

import math

import numpy as np
import pytest

from tgen.reports.standard_error import bits_per_byte_error


def test_equal_windows_have_the_usual_standard_error():
    bits = np.random.default_rng(1).normal(2.0, 0.5, 50)  # per byte, of windows of 100 bytes
    usual = bits.std(ddof=1) / math.sqrt(50)
    error = bits_per_byte_error(bits * 100 * math.log(2), [100] * 50)
    assert error == pytest.approx(usual, rel=1e-12)


def test_window_sizes_alone_cause_no_error():
    sizes = np.array([10, 200, 35])
    assert bits_per_byte_error(sizes * 1.7, sizes) == pytest.approx(0, abs=1e-12)
    assert bits_per_byte_error([3.0], [2]) == math.inf
    assert bits_per_byte_error([], []) == math.inf


def test_standard_error_matches_the_scatter_of_samples():
    random = np.random.default_rng(2)
    n_bytes = random.integers(50, 150, (2000, 40))
    nats = n_bytes * 1.4 + random.normal(0, 1, n_bytes.shape) * n_bytes * 0.3
    ratios = nats.sum(1) / math.log(2) / n_bytes.sum(1)
    errors = [bits_per_byte_error(*window) for window in zip(nats, n_bytes, strict=True)]
    assert np.mean(errors) == pytest.approx(ratios.std(), rel=0.05)
