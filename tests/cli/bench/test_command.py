"""`tgen bench --kv-cache`: timings, the line fit and the verdict."""

import json

import numpy as np
import pytest
import torch

from support.command import tgen
from support.models import make_model
from tgen.benchmark.kv_cache import default_lengths, fit_line, measure_lengths, verify_cache
from tgen.benchmark.statistics import timing
from tgen.checkpoint import model_dir
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.model.kv_cache import KVCache
from tgen.reports.benchmark import LengthReport, TrialReport


def test_every_length_is_timed_and_the_cache_is_verified(family):
    engine = TorchEngine(make_model(family))
    text = list(range(48))
    reports = list(measure_lengths(engine, text, default_lengths(48), trials=3))
    assert [r.trial for r in reports if isinstance(r, TrialReport)] == [0, 1, 2, 3]
    lengths = [r for r in reports if isinstance(r, LengthReport)]
    assert [r.length for r in lengths] == [16, 32, 48]
    for r in lengths:
        assert r.cache_bytes == r.length * engine.model.config.cache_bytes_per_token()
        keys = KVCache(engine.model.config, 1, device=engine.device, dtype=torch.float32)
        keys.extend(64)  # storage for exactly 64 tokens
        stored = sum(t.untyped_storage().nbytes() for t in keys.keys + keys.values)
        assert r.cache_bytes == r.length * stored / 64
        assert len(r.prefill.seconds) == len(r.cached.seconds) == len(r.uncached.seconds) == 3
        times = zip(r.uncached.seconds, r.cached.seconds, strict=True)
        ratios = [uncached / cached for uncached, cached in times]
        assert min(ratios) <= r.speedup.estimate <= max(ratios)
    verdict = verify_cache(engine, text[:12], 100)
    assert verdict.tokens == 36  # up to the context length
    assert verdict.identical
    assert verdict.max_logit_difference < 1e-4


def test_cache_that_changes_the_text_is_detected():
    engine = TorchEngine(make_model("qwen3"))
    original = engine.extend

    def extend_wrongly(tokens, **options):
        (logits,) = original(tokens, **options)
        return np.roll(logits, 1 if engine.lengths[0] == 20 and len(tokens[0]) == 1 else 0)[None]

    engine.extend = extend_wrongly
    verdict = verify_cache(engine, list(range(12)), 30)
    assert not verdict.identical
    assert verdict.first_difference == 8
    assert verdict.logit_gap is not None
    assert verdict.logit_gap > 0


def test_lengths_that_do_not_fit_are_errors():
    engine = TorchEngine(make_model("qwen3"))
    for length in (49, 1):
        with pytest.raises(UsageError):
            list(measure_lengths(engine, list(range(48)), [length], trials=1))
    assert default_lengths(2) == [2]
    assert default_lengths(256) == [16, 32, 64, 128, 256]


def test_line_fit_recovers_a_line():
    lengths = [16, 32, 64, 128, 256]
    times = [timing([1e-3 + 2e-6 * n] * 3) for n in lengths]
    fit = fit_line(lengths, times)
    assert (fit.intercept, fit.slope) == (pytest.approx(1e-3), pytest.approx(2e-6))
    assert fit.max_deviation < 1e-9
    assert fit.at(100) == pytest.approx(1.2e-3)
    bent = fit_line(lengths, [*times[:-1], timing([3e-3])])
    assert bent.max_deviation > 0.1


def test_kv_cache_mode_prints_its_results(trained):
    config = model_dir.load(trained).config
    arguments = ("bench", "--kv-cache", "-m", trained, "-r", 2)
    measured = json.loads(tgen(*arguments, "--json").stdout)
    assert measured["verdict"]["identical"] is True
    computed = config.cache_bytes_per_token()
    assert computed == 2 * config.n_layers * config.n_kv_heads * config.head_dim * 4
    assert measured["cache_bytes_per_token"] == computed
    for row in measured["lengths"]:
        assert row["cache_bytes"] == computed * row["length"]
    shown = tgen(*arguments, "-l", "8,16-32*2").stdout.decode()
    assert f"KV cache: {computed:,} bytes per token (measured), {computed:,} (computed" in shown
    assert "verdict: identical" in shown
    assert "predicted" in shown
    lengths = [line.split()[0] for line in shown.splitlines()[2:5]]
    assert lengths == ["8", "16", "32"]
