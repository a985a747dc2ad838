"""The distribution after samplers equals the counts of the sampler's draws."""

import numpy as np
import pytest

from support.chi_squared import critical_value
from tgen.config import SamplingConfig
from tgen.errors import ModelError
from tgen.generation.distribution import sampling_distribution
from tgen.generation.logits_processors import LogitsProcessors
from tgen.generation.sample import sample
from tgen.generation.vocabulary import Vocabulary

N_DRAWS = 20_000
TEXT = [3, 7, 3, 11, 3, 7]
VOCABULARY = Vocabulary([b"%d " % i for i in range(60)], ends=[0])
SETTINGS = {
    "defaults": {},
    "all off": dict(temperature=1, top_k=0),
    "greedy": dict(temperature=0),
    "greedy with xtc": dict(temperature=0, xtc_probability=0.5, xtc_threshold=0.05),
    "top-p": dict(temperature=1.4, top_k=0, top_p=0.8),
    "min-p first": dict(min_p=0.1, top_p=0.9, samplers="min_p,temperature,top_p"),
    "typical": dict(typical_p=0.7, top_k=30),
    "top-n-sigma": dict(top_n_sigma=1.5, temperature=2),
    "xtc": dict(xtc_probability=0.3, xtc_threshold=0.05, top_k=0, temperature=1),
    "xtc before top-p": dict(
        xtc_probability=0.6, xtc_threshold=0.05, top_p=0.6, samplers="xtc,top_p,temperature"
    ),
    "xtc always": dict(xtc_probability=1, xtc_threshold=0.02),
    "penalties": dict(repetition_penalty=1.5, frequency_penalty=0.4, temperature=1),
    "repeats": dict(no_repeat_ngram=2, dry_multiplier=2, top_k=0),
    "bias and ban": dict(bias={"5 ": 3}, ban=["9 "], logit_bias={12: 4}, top_k=5),
}


def random_logits(seed, size=60):
    return (np.random.default_rng(seed).normal(size=size) * 2).astype(np.float32)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_final_probabilities_equal_the_counts_of_draws(options):
    sampling, logits = SamplingConfig(**options), random_logits(5)
    report = sampling_distribution(logits, TEXT, sampling, VOCABULARY)
    processed = logits.copy()
    LogitsProcessors(sampling, VOCABULARY).apply(processed, TEXT, len(TEXT), b"", 99)
    draws = sample(
        np.tile(processed, (N_DRAWS, 1)), sampling, seeds=[7] * N_DRAWS, positions=range(N_DRAWS)
    )
    counts = np.bincount(draws, minlength=60)
    expected = np.zeros(60)
    for one in report.candidates:
        expected[one.id] = N_DRAWS * one.final
    assert expected.sum() == pytest.approx(N_DRAWS)
    assert (counts[expected == 0] == 0).all()
    rare = (expected > 0) & (expected < 5)  # merged: the test needs 5 draws per class
    observed = [*counts[expected >= 5], counts[rare].sum()]
    wanted = [*expected[expected >= 5], expected[rare].sum()]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        chi_square = sum((a - b) ** 2 / b for a, b in zip(observed, wanted, strict=True))
        assert chi_square < critical_value(len(wanted) - 1, 1e-3)
    else:
        assert observed == [N_DRAWS]


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_steps_account_for_all_candidates(options):
    sampling, logits = SamplingConfig(**options), random_logits(6)
    report = sampling_distribution(logits, TEXT, sampling, VOCABULARY)
    names = [step.sampler for step in report.steps]
    left = 60
    for i, step in enumerate(report.steps):
        removed = [one for one in report.candidates if one.removed_by == step.sampler]
        assert (len(removed), step.left) == (step.candidates, left - step.candidates)
        assert sum(one.after[i] for one in report.candidates) == pytest.approx(1)
        left = step.left
    assert len({*names}) == len(names)
    for one in report.candidates:
        assert one.final == (one.after[-1] if names else one.probability)
        if one.removed_by and not 0 < report.xtc_probability < 1:
            assert one.final == 0
    model = np.exp(logits.astype(np.float64))
    for one in report.candidates:
        assert one.probability == pytest.approx(model[one.id] / model.sum())
        assert one.logit == logits[one.id]
        assert one.text == (b"" if one.id == 0 else b"%d " % one.id)


def test_removed_mass_is_that_of_the_explanation():
    sampling, logits = SamplingConfig(top_k=20, top_p=0.7, min_p=0.1), random_logits(8)
    explanations = [[]]
    sample(logits[None], sampling, seeds=[1], positions=[2], explanations=explanations)
    report = sampling_distribution(logits, TEXT, sampling, VOCABULARY)
    for step, removed in zip(report.steps, explanations[0], strict=True):
        assert step._replace(probability=0) == removed._replace(probability=0)
        assert step.probability == pytest.approx(removed.probability, abs=1e-12)


def test_top_lists_the_largest_before_or_after_and_the_given_ones():
    logits = np.arange(60, dtype=np.float32) / 10
    sampling = SamplingConfig(ban=["59 ", "58 ", "57 "], top_k=2)
    report = sampling_distribution(logits, TEXT, sampling, VOCABULARY, top=4, also=[3, 56])
    assert [one.id for one in report.candidates] == [56, 55, 59, 58, 3]
    assert [one.removed_by for one in report.candidates] == ["", "", *2 * ["penalties"], "top_k"]


def test_ids_without_a_token_and_logits_that_are_not_finite():
    vocabulary = Vocabulary([b"a", b"b", b"c"], unused=[1])
    logits = np.array([1, 9, 2, 8], np.float32)  # the last one is past the vocabulary
    report = sampling_distribution(logits, [0], SamplingConfig(), vocabulary)
    assert [one.id for one in report.candidates if one.final > 0] == [2, 0]
    with pytest.raises(ModelError, match="not finite"):
        sampling_distribution(np.full(3, np.nan), [0], SamplingConfig(), vocabulary)
