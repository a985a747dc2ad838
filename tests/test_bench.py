"""Measuring: what is shown is what was measured."""

import json

import numpy as np
import pytest
import torch

from conftest import make_model, tgen
from tgen.benchmark.kv_cache import compare, default_lengths, measure
from tgen.benchmark.statistics import timing
from tgen.checkpoint import directory
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.model.kv_cache import KVCache
from tgen.reports import LengthReport, TrialReport


def test_timings_of_every_length_and_the_verdict(family):
    engine = TorchEngine(make_model(family))
    text = list(range(48))
    reports = list(measure(engine, text, default_lengths(48), trials=3, uncached=True))
    assert [r.trial for r in reports if isinstance(r, TrialReport)] == [0, 1, 2, 3]
    lengths = [r for r in reports if isinstance(r, LengthReport)]
    assert [r.length for r in lengths] == [16, 32, 47]
    for r in lengths:
        assert r.cache_bytes == r.length * engine.model.config.cache_bytes_per_token
        keys = KVCache(engine.model.config, 1, device=engine.device, dtype=torch.float32)
        keys.extend(64)  # storage for exactly 64 tokens
        stored = sum(t.untyped_storage().nbytes() for t in keys.keys + keys.values)
        assert r.cache_bytes == r.length * stored / 64
        assert r.uncached is not None
        assert len(r.prefill.seconds) == len(r.cached.seconds) == len(r.uncached.seconds) == 3
        assert r.speedup == r.uncached.median / r.cached.median
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
    for lengths, trials in [([48], 1), ([0], 1), ([4], 0)]:
        with pytest.raises(UsageError):
            list(measure(engine, list(range(48)), lengths, trials=trials, uncached=False))
    assert default_lengths(2) == [1]


def test_statistics():
    t = timing([1, 2, 3, 4, 100])
    assert (t.median, t.low) == (3, pytest.approx(1.4))


def test_the_commands_print_what_the_functions_say(trained):
    bundle = directory.load(trained)
    measured = json.loads(tgen("bench", "--kv-cache", "-m", trained, "-r", 2, "--json").stdout)
    assert measured["verdict"]["identical"] is True
    assert measured["cache_bytes_per_token"] == bundle.config.cache_bytes_per_token
    plain = tgen("bench", "-m", trained, "-r", 2, "-l", 8).stdout.decode()
    assert "cached ms" in plain
    assert "verdict" not in plain
