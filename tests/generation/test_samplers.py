"""Samplers and penalties equal those of transformers or their definition; so do the samples."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as reference

from support.chi_squared import critical_value
from tgen.config import SAMPLERS, SamplingConfig
from tgen.generation import logits_processors, truncation
from tgen.generation.logits_processors import LogitsProcessors
from tgen.generation.sample import sample
from tgen.generation.vocabulary import Vocabulary

OFF = dict(temperature=1.0, top_k=0)


def random_logits(seed, rows=4, size=60, spread=3.0):
    values = np.random.default_rng(seed).normal(size=(rows, size)) * spread
    return values.astype(np.float32)


def ours(logits, apply):
    """Apply a sampler; return logits by token id (B, V)."""
    ids, ranked = truncation.sort_candidates(logits, 0)
    out = np.full(logits.shape, -np.inf)
    np.put_along_axis(out, ids, apply(ranked), axis=1)
    return out


def theirs(logits, processor, text=None):
    ids = torch.tensor(text if text is not None else [[0]] * len(logits))
    return processor(ids, torch.tensor(logits, dtype=torch.float64)).numpy()


@pytest.mark.parametrize("seed", range(20))
def test_samplers_equal_those_of_transformers(seed):
    logits, random = random_logits(seed), np.random.default_rng(seed)
    p, k = float(random.uniform(0.05, 0.99)), int(random.integers(1, 70))
    pairs = [
        (lambda x: truncation.top_k(x, k), reference.TopKLogitsWarper(k)),
        (lambda x: truncation.top_p(x, p), reference.TopPLogitsWarper(p)),
        (lambda x: truncation.min_p(x, p), reference.MinPLogitsWarper(p)),
        (lambda x: truncation.typical_p(x, p), reference.TypicalLogitsWarper(p)),
    ]
    for apply, processor in pairs:
        np.testing.assert_array_equal(ours(logits, apply), theirs(logits, processor))
    t = float(random.uniform(0.1, 3))
    result = truncation.softmax(ours(logits, lambda x: truncation.apply_temperature(x, t)))
    expected = truncation.softmax(theirs(logits, reference.TemperatureLogitsWarper(t)))
    np.testing.assert_allclose(result, expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_top_n_sigma_and_xtc_follow_their_definition(seed):
    logits = random_logits(seed).astype(np.float64).astype(np.float32)
    n, threshold = 0.3 + seed / 4, 0.02 * (seed + 1)
    left = ours(logits, lambda x: truncation.top_n_sigma(x, n)) > -np.inf
    for row, mask in zip(logits.astype(np.float64), left, strict=True):
        assert mask.tolist() == (row >= row.max() - n * row.std()).tolist()
    chosen = np.array([True, False, True, True])
    left = ours(logits, lambda x: truncation.xtc(x, threshold, chosen)) > -np.inf
    for row, mask, sampled in zip(logits, left, chosen, strict=True):
        p = truncation.softmax(row[None])[0]
        probable = sorted((i for i in range(len(p)) if p[i] >= threshold), key=lambda i: -p[i])
        removed = set(probable[:-1]) if sampled else set()
        assert set(np.flatnonzero(~mask)) == removed


def repeats_of(text):
    repeats = logits_processors.Repeats()
    repeats.read(text)
    return repeats


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 99))
@settings(deadline=None)
def test_penalties_equal_those_of_transformers(text, seed):
    logits = random_logits(seed, 1, 10)[0]
    counts = Counter(text)
    result = logits.astype(np.float64)
    penalize = logits_processors.penalize_repetition
    penalize(result, counts, SamplingConfig(repetition_penalty=1.3))
    expected = theirs(logits[None], reference.RepetitionPenaltyLogitsProcessor(1.3), [text])[0]
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    result = logits.astype(np.float64)
    penalize(result, counts, SamplingConfig(presence_penalty=0.5, frequency_penalty=0.25))
    for i in range(10):
        assert result[i] == pytest.approx(logits[i] - 0.25 * counts[i] - 0.5 * (counts[i] > 0))
    for n in (1, 2, 3):
        result = logits.astype(np.float64)
        logits_processors.forbid_repeated_ngrams(result, repeats_of(text), n)
        expected = theirs(logits[None], reference.NoRepeatNGramLogitsProcessor(n), [text])[0]
        np.testing.assert_array_equal(result, expected)


def probabilities_of(logits, sampling, seen):
    """Return each token's probability according to transformers."""
    row = logits.astype(np.float64)[None]
    if sampling.repetition_penalty != 1:
        processor = reference.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        row = theirs(row, processor, [seen])
    if sampling.no_repeat_ngram:
        row = theirs(row, reference.NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram), [seen])
    warpers = {
        "top_k": sampling.top_k and reference.TopKLogitsWarper(sampling.top_k),
        "top_p": sampling.top_p < 1 and reference.TopPLogitsWarper(sampling.top_p),
        "min_p": sampling.min_p and reference.MinPLogitsWarper(sampling.min_p),
        "typical_p": sampling.typical_p < 1 and reference.TypicalLogitsWarper(sampling.typical_p),
        "temperature": reference.TemperatureLogitsWarper(sampling.temperature),
    }
    for name in sampling.samplers:
        if warpers.get(name):
            row = theirs(row, warpers[name])
    return truncation.softmax(row)[0]


# Settings, and wrong ones whose samples the test must detect.
MISTAKES = [
    (dict(temperature=0.7), dict(temperature=0.74)),
    (dict(temperature=1.5), dict(temperature=1.0)),
    (dict(temperature=0.5), dict(temperature=2.0)),
    (dict(top_k=3), dict(top_k=4)),
    (dict(top_k=3), dict(top_k=2)),
    (dict(top_k=1), dict(top_k=0)),
    (dict(top_p=0.8), dict(top_p=0.95)),
    (dict(top_p=0.8), dict(top_p=0.5)),
    (dict(top_p=0.5), dict(top_p=1.0)),
    (dict(min_p=0.1), dict(min_p=0.0)),
    (dict(min_p=0.2), dict(min_p=0.4)),
    (dict(min_p=0.3), dict(min_p=0.1)),
    (dict(typical_p=0.6), dict(typical_p=1.0)),
    (dict(typical_p=0.6), dict(top_p=0.6)),
    (dict(repetition_penalty=1.5), dict(repetition_penalty=1.0)),
    (dict(repetition_penalty=1.5), dict(repetition_penalty=1.3)),
    (dict(no_repeat_ngram=2), dict(no_repeat_ngram=0)),
    (dict(no_repeat_ngram=2), dict(no_repeat_ngram=1)),
    (
        dict(top_p=0.7, temperature=2.0),
        dict(top_p=0.7, temperature=2.0, samplers=("temperature", "top_p")),
    ),
    (
        dict(min_p=0.3, temperature=2.0, samplers=("temperature", "min_p")),
        dict(min_p=0.3, temperature=2.0),
    ),
]
LOGITS = np.array([0.0, 1.0, 2.0, 0.5, -1.0, 1.5, 1.8, -0.5], np.float32)
SEEN = [2, 5, 1, 5, 2]
N = 40_000  # samples
# The random numbers of a seed's 64 positions are generated together.
PLACES = dict(seeds=[i // 64 for i in range(N)], positions=[i % 64 for i in range(N)])


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_samples_follow_the_distribution_and_not_a_wrong_one(number):
    right, wrong = (SamplingConfig(**(OFF | fields), seed=number) for fields in MISTAKES[number])
    processed = LOGITS.copy()
    LogitsProcessors(right, Vocabulary()).apply(processed, SEEN, 0, b"", N)
    logits = np.repeat(processed[None], N, axis=0)
    sampled = sample(logits, right, **PLACES)
    counts = np.bincount(sampled, minlength=len(LOGITS))

    def fits(sampling):
        p = probabilities_of(LOGITS, sampling, SEEN)
        if counts[p == 0].any():
            return False
        expected = p[p > 0] * N
        if len(expected) == 1:
            return True
        chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
        return chi_square < critical_value(len(expected) - 1, 1e-6 / len(MISTAKES))

    assert fits(right)
    assert not fits(wrong)


def test_xtc_uses_its_own_random_numbers():
    sampling = SamplingConfig(**OFF, xtc_probability=0.4, xtc_threshold=0.15, seed=9)
    sampled = sample(np.repeat(LOGITS[None], N, axis=0), sampling, **PLACES)
    p = truncation.softmax(LOGITS[None])[0]
    probable = np.flatnonzero(p >= 0.15)
    excluded = p.copy()
    excluded[[i for i in probable if p[i] > p[probable].min()]] = 0
    expected = 0.6 * p + 0.4 * excluded / excluded.sum()
    counts = np.bincount(sampled, minlength=len(LOGITS))
    chi_square = ((counts - expected * N) ** 2 / (expected * N)).sum()
    assert chi_square < critical_value(len(LOGITS) - 1, 1e-6)
    wrong = ((counts - p * N) ** 2 / (p * N)).sum()
    assert wrong > critical_value(len(LOGITS) - 1, 1e-6)


@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 1e-30, 0.8, 1e30]),
    top_k=st.integers(0, 9),
    shares=st.tuples(*[st.floats(1e-6, 1)] * 4),
    sigma=st.floats(0, 5),
    order=st.permutations(SAMPLERS),
)
@settings(deadline=None)
def test_any_settings_in_any_order_leave_a_candidate(
    seed, temperature, top_k, shares, sigma, order
):
    sampling = SamplingConfig(
        temperature=temperature,
        top_k=top_k,
        top_p=shares[0],
        min_p=shares[1],
        typical_p=shares[2],
        top_n_sigma=sigma,
        xtc_probability=0.5,
        xtc_threshold=shares[3],
        samplers=tuple(order),
        seed=seed,
    )
    logits = random_logits(seed, 3, 8, spread=20.0)
    logits[0, :3] = -np.inf
    sampled = sample(logits, sampling, seeds=[seed, seed + 1, seed + 2], positions=[4, 5, 6])
    assert sampled[0] >= 3
    for row in range(3):  # the batch changes nothing
        alone = sample(logits[row : row + 1], sampling, seeds=[seed + row], positions=[4 + row])
        assert alone == sampled[row : row + 1]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.integers(0, 14))
def test_k_most_likely_are_sorted_with_ties_by_id(values, k):
    (ids,), (ranked,) = truncation.sort_candidates(np.array([values], np.float32), k)
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert ids.tolist() == best[: k or len(values)]
    assert ranked.tolist() == [values[i] for i in ids]


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12), st.floats(0.01, 1))
def test_top_p_keeps_the_fewest_candidates_with_mass_p(values, p):
    _, ranked = truncation.sort_candidates(np.array([values], np.float32), 0)
    kept = int((truncation.top_p(ranked, p) > -np.inf).sum())
    probabilities = truncation.softmax(ranked)[0]
    assert (truncation.top_p(ranked, p)[0, :kept] > -np.inf).all()
    assert probabilities[: kept - 1].sum() < p + 1e-12
    assert kept == len(values) or probabilities[:kept].sum() >= p - 1e-12
