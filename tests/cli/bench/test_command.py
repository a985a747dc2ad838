"""Measuring: what is shown is what was measured."""

import json

import numpy as np
import pytest
import torch

from support.command import tgen
from support.models import make_model
from tgen.benchmark.kv_cache import compare, default_lengths, growth, measure
from tgen.benchmark.statistics import timing
from tgen.checkpoint import model_dir
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.model.kv_cache import KVCache
from tgen.reports import LengthReport, TrialReport


def test_timings_of_every_length_and_the_verdict(family):
    engine = TorchEngine(make_model(family))
    text = list(range(48))
    reports = list(measure(engine, text, default_lengths(48), trials=3))
    assert [r.trial for r in reports if isinstance(r, TrialReport)] == [0, 1, 2, 3]
    lengths = [r for r in reports if isinstance(r, LengthReport)]
    assert [r.length for r in lengths] == [16, 32, 48]
    for r in lengths:
        assert r.cache_bytes == r.length * engine.model.config.cache_bytes_per_token
        keys = KVCache(engine.model.config, 1, device=engine.device, dtype=torch.float32)
        keys.extend(64)  # storage for exactly 64 tokens
        stored = sum(t.untyped_storage().nbytes() for t in keys.keys + keys.values)
        assert r.cache_bytes == r.length * stored / 64
        assert len(r.prefill.seconds) == len(r.cached.seconds) == len(r.uncached.seconds) == 3
        times = zip(r.uncached.seconds, r.cached.seconds, strict=True)
        ratios = [plain / cached for plain, cached in times]
        assert min(ratios) <= r.speedup.middle <= max(ratios)
    verdict = compare(engine, text[:12], 100)
    assert verdict.tokens == 36  # to the end of the context
    assert verdict.identical
    assert verdict.max_logit_difference < 1e-4


def test_a_cache_that_changes_the_text_is_found_out():
    engine = TorchEngine(make_model("qwen3"))
    honest = engine.extend

    def forgetful(tokens, **options):
        (logits,) = honest(tokens, **options)
        return np.roll(logits, 1 if engine.lengths[0] == 20 and len(tokens[0]) == 1 else 0)[None]

    engine.extend = forgetful
    verdict = compare(engine, list(range(12)), 30)
    assert not verdict.identical
    assert verdict.first_difference == 8
    assert verdict.gap is not None
    assert verdict.gap > 0


def test_lengths_that_do_not_fit_are_refused():
    engine = TorchEngine(make_model("qwen3"))
    for lengths, trials in [([49], 1), ([1], 1), ([4], 0)]:
        with pytest.raises(UsageError):
            list(measure(engine, list(range(48)), lengths, trials=trials))
    assert default_lengths(2) == [2]
    assert default_lengths(256) == [16, 32, 64, 128, 256]


def test_a_line_through_times_on_a_line_is_that_line():
    lengths = [16, 32, 64, 128, 256]
    times = [timing([1e-3 + 2e-6 * n] * 3) for n in lengths]
    found = growth(lengths, times)
    assert (found.flat, found.per_token) == (pytest.approx(1e-3), pytest.approx(2e-6))
    assert found.deviation < 1e-9
    assert found.at(100) == pytest.approx(1.2e-3)
    bent = growth(lengths, [*times[:-1], timing([3e-3])])
    assert bent.deviation > 0.1


def test_the_study_of_the_cache_says_what_it_proves(trained):
    config = model_dir.load(trained).config
    arguments = ("bench", "--kv-cache", "-m", trained, "-r", 2)
    measured = json.loads(tgen(*arguments, "--json").stdout)
    assert measured["verdict"]["identical"] is True
    formula = config.cache_bytes_per_token
    assert formula == 2 * config.n_layers * config.n_kv_heads * config.head_dim * 4
    assert measured["cache_bytes_per_token"] == formula
    for row in measured["lengths"]:
        assert row["cache_bytes"] == formula * row["length"]
    shown = tgen(*arguments, "-l", "8,16-32*2").stdout.decode()
    assert f"cache: {formula:,} bytes a token" in shown
    assert "is the same" in shown
    assert "verdict: identical" in shown
    assert "the lines explain" in shown
    lengths = [line.split()[0] for line in shown.splitlines()[2:5]]
    assert lengths == ["8", "16", "32"]
