"""Sampling: stateless random numbers, extreme settings, explanations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.config import SamplingConfig
from tgen.errors import ModelError, UsageError
from tgen.generation.random_numbers import row_seed, uniforms
from tgen.generation.sample import sample
from tgen.generation.truncation import softmax
from tgen.reports.generation import RemovedCandidates

GREEDY = SamplingConfig(temperature=0)


def test_explanations_count_removed_candidates_and_change_nothing():
    logits = np.random.default_rng(3).normal(size=(2, 50)).astype(np.float32) * 2
    sampling = SamplingConfig(top_k=20, top_p=0.8, min_p=0.05, seed=1)
    explanations: list[list[RemovedCandidates]] = [[], []]
    options = dict(seeds=[1, 2], positions=[3, 4])
    assert sample(logits, sampling, **options, explanations=explanations) == sample(
        logits, sampling, **options
    )
    for row, steps in zip(logits, explanations, strict=True):
        assert [step.sampler for step in steps] == ["top_k", "top_p", "min_p", "temperature"]
        left = np.sort(row)[::-1].astype(np.float64)
        for step in steps[:3]:
            p = softmax(left[None])[0]
            assert step.left + step.candidates == len(left)
            assert step.probability == pytest.approx(p[step.left :].sum())
            left = left[: step.left]
    greedy: list[list[RemovedCandidates]] = [[], []]
    expected = sample(logits, GREEDY, **options)
    assert sample(logits, GREEDY, **options, explanations=greedy) == expected
    assert [steps[-1].left for steps in greedy] == [1, 1]


def test_random_numbers_are_a_function_of_seed_position_and_purpose():
    seeds, positions = [n // 40 for n in range(200)], [n % 40 for n in range(200)]
    seen = {u for purpose in range(5) for u in uniforms(seeds, positions, purpose)}
    assert len(seen) == 1000
    assert all(0 <= u < 1 for u in seen)
    assert uniforms([1, 1], [2, 2], 3) == uniforms([1], [2], 3) * 2
    assert uniforms([1], [2], 3) != uniforms([1], [3], 2)
    assert len({row_seed(7, row) for row in range(1000)}) == 1000
    assert row_seed(7, 0) == 7
    assert row_seed(2**63 - 1, 5) < 2**53
    assert abs(np.mean(list(seen)) - 0.5) < 0.05


@given(st.floats(1e-45, 1e30), st.integers(0, 2**63 - 1))
@settings(deadline=None)
def test_extreme_temperatures_and_logits_sample_an_allowed_token(temperature, seed):
    logits = np.array([[3e38, -3e38, 0, -np.inf, 5]], np.float32)
    sampling = SamplingConfig(temperature=temperature, top_k=0, seed=seed)
    assert sample(logits, sampling, seeds=[seed], positions=[9])[0] in (0, 1, 2, 4)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": float("nan")},
        {"regex": "\udced"},
        {"grammar": 'start: "\udced"'},
        {"temperature": -1},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"seed": -1},
    ],
)
def test_invalid_settings_raise(values):
    with pytest.raises(UsageError):
        SamplingConfig(**values)


def test_numbers_of_numpy_are_settings():
    sampling = SamplingConfig(temperature=np.float32(0.5), top_k=np.int64(3))
    assert (sampling.temperature, sampling.top_k) == (0.5, 3)


def test_nan_logits_raise():
    logits = np.full((1, 4), np.nan, np.float32)
    with pytest.raises(ModelError, match="not finite"):
        sample(logits, GREEDY, seeds=[0], positions=[1])
