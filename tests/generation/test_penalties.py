"""Penalties of repeated tokens equal their definitions, read token by token or at once."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tgen.config import SamplingConfig
from tgen.generation.logits_processors import (
    Occurrences,
    Repeats,
    dry,
    forbid_repeated_ngrams,
)

texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def dry_by_definition(logits, tokens, sampling, breakers):
    allowed_length, longest = sampling.dry_allowed_length, {}
    last = len(tokens) - 1
    for i in range(last):  # a repeat that ends at i and at the end of the text
        n = 0
        while n <= i and tokens[i - n] == tokens[last - n] and tokens[i - n] not in breakers:
            n += 1
        if n >= allowed_length:
            longest[tokens[i + 1]] = max(n, longest.get(tokens[i + 1], 0))
    for token, n in longest.items():
        if token not in breakers:
            with np.errstate(over="ignore"):
                factor = np.float64(sampling.dry_base) ** (n - allowed_length)
            logits[token] -= sampling.dry_multiplier * min(factor, 1e30)


def ngrams_by_definition(logits, tokens, n):
    if len(tokens) >= n:
        end = tokens[len(tokens) - n + 1 :]
        for i in range(len(tokens) - n + 1):
            if tokens[i : i + n - 1] == end:
                logits[tokens[i + n - 1]] = -np.inf


@settings(deadline=None)
@given(
    text=texts,
    n_prompt=st.integers(1, 30),
    start=st.integers(0, 30),
    window=st.integers(0, 12),
    breakers=st.sets(st.integers(0, 3), max_size=2),
    allowed=st.integers(1, 4),
)
def test_penalties_equal_their_definitions(text, n_prompt, start, window, breakers, allowed):
    repeats, ngrams = Repeats(window=window, breakers=breakers), Repeats()
    sampling = SamplingConfig(dry_multiplier=0.8, dry_allowed_length=allowed)
    for n in range(min(n_prompt, len(text)), len(text) + 1):
        seen = text[start:n]
        repeats.read(text[:n], start)
        ngrams.read(text[:n], start)
        expected, result = np.zeros((2, 4), np.float32)
        dry_by_definition(expected, seen[-window:], sampling, breakers)
        dry(result, repeats, sampling)
        assert result.tolist() == expected.tolist()
        expected, result = np.zeros((2, 4), np.float32)
        ngrams_by_definition(expected, seen, allowed)
        forbid_repeated_ngrams(result, ngrams, allowed)
        assert result.tolist() == expected.tolist()


def test_repeats_of_periodic_texts_equal_their_definition():
    for period in (1, 2, 7):
        text = [i % period for i in range(120)] + [9] + [i % period for i in range(60)]
        repeats = Repeats()
        repeats.read(text[:100])
        for n in range(101, len(text) + 1):
            repeats.read(text[:n])
        at_once = Repeats()
        at_once.read(text)
        assert repeats.ids.tolist() == at_once.ids.tolist() == text
        assert repeats.lengths.tolist() == at_once.lengths.tolist()
        expected, result = np.zeros((2, 10))
        sampling = SamplingConfig(dry_multiplier=0.8, dry_base=1.1)
        dry_by_definition(expected, text, sampling, ())
        dry(result, at_once, sampling)
        assert result.tolist() == expected.tolist()


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 6), st.integers(0, 8))
@settings(deadline=None)
def test_occurrences_are_those_of_the_window_however_the_text_is_read(text, start, window):
    occurrences = Occurrences(window)
    for end in range(len(text) + 1):
        occurrences.read(text[:end], start)
        first = max(start, end - window) if window else start
        assert occurrences.counts == Counter(text[first:end])
    at_once = Occurrences(window)
    at_once.read(text, start)
    assert at_once.counts == occurrences.counts
