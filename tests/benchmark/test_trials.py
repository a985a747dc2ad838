"""Workloads are interleaved as requested, and only significant differences are reported."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.models import make_model
from tgen.benchmark.backend import Backend, EngineBackend, random_tokens
from tgen.benchmark.comparison import (
    check_comparable,
    compare_paired,
    compare_with_saved,
    is_slower_by,
)
from tgen.benchmark.roofline import PassCost, measure_peak_rates, pass_cost
from tgen.benchmark.sweep import compare_backends, open_setups, sweep
from tgen.benchmark.trials import Trial, run_trial, run_trials, throughput_report
from tgen.benchmark.workload import Workload
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.model.attention import causal_mask
from tgen.reports.benchmark import PeakRates

PP, TG = Workload(n_prompt=8), Workload(n_gen=3)


class Clock:
    """Time that advances only in the fake backends."""

    def __init__(self, monkeypatch):
        self.now = 0
        monkeypatch.setattr("time.perf_counter_ns", lambda: self.now)
        monkeypatch.setattr("time.sleep", lambda _: None)


class FakeBackend(Backend):
    """Takes a given time with some noise, and records its calls."""

    def __init__(self, clock, log, name="", *, factor=1.0, seed=0):
        self.clock, self.log, self.name, self.factor = clock, log, name, factor
        self.random = np.random.default_rng(seed)
        self.thread_pool = name

    def _pass(self, what, nanoseconds):
        self.log.append((self.name, what))
        self.clock.now += round(nanoseconds * self.factor * self.random.lognormal(0, 0.03))

    def prepare(self, _):
        self.log.append((self.name, "prepare"))
        self.clock.now += 10**12  # not timed

    def logits(self):
        raise NotImplementedError

    def extend(self, n):
        if n > 1:
            self._pass(f"prompt {n}", 10**7 * n)
        else:
            self._pass("step", 10**8)


def test_trials_alternate_their_order_after_a_warm_up(monkeypatch):
    log = []
    clock = Clock(monkeypatch)
    backends = FakeBackend(clock, log, "a"), FakeBackend(clock, log, "b")
    rounds = list(run_trials([(backends[0], PP), (backends[1], TG)], trials=2))
    runs = [name for name, what in log if what == "prepare"]
    # A backend with other threads than the previous one is warmed up, untimed.
    assert runs == ["a", *"bb", "b", *"aa", "a", *"bb"]
    assert log.count(("a", "prompt 8")) == 3 + 1
    assert log.count(("b", "step")) == 9 + 6
    assert [len(trials) for trials in rounds] == [2, 2]
    for a, b in rounds:
        assert 0.07 < a.seconds < 0.09
        assert (a.decode, b.prefill) == (0, 0)
        assert 0.2 < b.seconds < 0.4


def test_engine_processes_the_same_tokens_and_reuses_the_depth(family):
    engine = TorchEngine(make_model(family))
    tokens = random_tokens(300, 48, seed=1)
    assert tokens == random_tokens(300, 48, seed=1) != random_tokens(300, 48, seed=2)
    backend = EngineBackend(engine, tokens)
    passes = []
    original = engine.extend

    def extend(rows, *, every_position=False):
        passes.append([list(row) for row in rows])
        return original(rows, every_position=every_position)

    engine.extend = extend
    test = Workload(n_prompt=5, n_gen=2, n_depth=7, batch=3)
    trials = [run_trial(backend, test) for _ in range(2)]
    parts = [tokens[:7], tokens[7:12], tokens[12:13], tokens[13:14]]
    once = [[part] * 3 for part in parts]
    assert passes == [*once, *once[1:]]  # the depth is processed once
    assert trials[0].cache_bytes == 3 * 14 * engine.model.config.cache_bytes_per_token()
    run_trial(backend, Workload(n_gen=1))
    assert engine.lengths == [1]


def test_labels_equal_llama_benchs_and_oversized_workloads_are_errors():
    assert [PP.label, TG.label] == ["pp8", "tg3"]
    assert Workload(n_prompt=512, n_gen=128, n_depth=4096).label == "pp512+tg128 @ d4096"
    for test, context in [(Workload(), 99), (Workload(n_prompt=4, n_gen=4, n_depth=4), 11)]:
        with pytest.raises(UsageError):
            test.check(context)
    Workload(n_prompt=4, n_gen=4, n_depth=4).check(12)


def reported(seconds, test=PP):
    trials = [Trial(prefill=round(s * 1e9), decode=0, cache_bytes=80) for s in seconds]
    options = {"engine": "kernels", "dtype": "float32", "threads": 2}
    return throughput_report(test, trials, bound=(0.05, "memory"), **options)


def test_report_summarizes_its_trials():
    report = reported([0.1, 0.2, 0.1, 0.1, 0.1, 0.1])
    assert report.rates == pytest.approx([80, 40, 80, 80, 80, 80])
    assert 40 <= report.rate.low <= report.rate.estimate == pytest.approx(80)
    assert report.first_token.median == pytest.approx(0.1)
    assert report.cache_bytes_per_token == 10
    assert report.peak_rate == pytest.approx(160)
    assert (report.bound_by, report.label) == ("memory", "pp8")
    assert not any("faster than" in warning for warning in report.warnings)
    assert any("faster than" in warning for warning in reported([0.04] * 6).warnings)


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (1.0, ""), (0.9, "faster")])
def test_only_a_real_change_is_significant(monkeypatch, factor, verdict):
    """Compare a backend of known speed: interleaved, and with a saved run."""
    log, n = [], 20
    clock = Clock(monkeypatch)
    ours = FakeBackend(clock, log, "a", factor=factor, seed=1)
    theirs = FakeBackend(clock, log, "a", seed=2)
    rounds = list(run_trials([(ours, PP), (theirs, PP), (ours, PP)], trials=n))
    a, b, again = ([trial.seconds for trial in column] for column in zip(*rounds, strict=True))
    difference = compare_paired("pp8", a, b, again)
    assert difference.verdict == verdict
    assert difference.ratio.low <= 1 / factor <= difference.ratio.high
    assert difference.noise.low <= 1 <= difference.noise.high
    then = {"samples_ns": [round(s * 1e9) for s in b]}
    assert compare_with_saved(reported(a), then).verdict == verdict
    # A change that the machine explains is not significant.
    probe = [1e-3 * factor * x for x in np.random.default_rng(3).lognormal(0, 0.01, n)]
    before = then | {"probe_ns": [round(1e9 * s / factor) for s in probe]}
    difference = compare_with_saved(replace(reported(a), probe_seconds=probe), before)
    assert difference.verdict == ""
    assert difference.probe_ratio.low <= 1 / factor <= difference.probe_ratio.high
    # Slower by a fraction only if the whole interval is.
    change = compare_with_saved(reported(a), then)
    assert is_slower_by(change, 0.03) == (factor == 1.1)
    assert not is_slower_by(change, 0.12)


def test_runs_of_another_machine_or_model_are_not_comparable():
    facts = {
        "cpu_info": "A", "gpu_info": "", "family": "llama", "model_n_params": 1, "n_cpus": 2,
    }  # fmt: skip
    check_comparable([facts | {"more": 1}], facts)
    for name, value in [("cpu_info", "B"), ("model_n_params", 2), ("family", "x")]:
        with pytest.raises(UsageError, match=str(value)):
            check_comparable([facts, facts | {name: value}], facts)


def test_lower_bound_sums_over_passes(family):
    model = make_model(family)
    config = model.config
    shapes = {name: array.shape for name, array in model.to_arrays().items()}
    cost = pass_cost(config, shapes, "float32")
    both = cost.weights + cost.output_weights
    assert cost.weight_bytes == 4 * both
    half = pass_cost(config, shapes, "bfloat16", cache_dtype="float16")
    assert (half.weight_bytes, half.key_bytes) == (2 * both, cost.key_bytes / 2)
    # Counted from the model's own layers.
    parameters = model.named_parameters()
    assert cost.weights == sum(p.numel() for name, p in parameters if name.endswith("proj.weight"))
    assert cost.output_weights == model.output_weight.numel()
    slow_memory = PeakRates(read_bytes=1, bytes_per_second=1.0, flops_per_second=1e30)
    slow_compute = PeakRates(read_bytes=1, bytes_per_second=1e30, flops_per_second=1.0)
    cost = PassCost(
        weights=90, output_weights=10, weight_bytes=400, key_flops=8, key_bytes=16,
        windows={None: 1.0},
    )  # fmt: skip
    test = Workload(n_prompt=3, n_gen=2, n_depth=4, batch=2)
    n_bytes = (400 + 2 * 7 * 16) + (400 + 2 * 8 * 16) + (400 + 2 * 9 * 16)
    assert cost.min_seconds(test, slow_memory) == (pytest.approx(n_bytes), "memory")
    n_keys = (5 + 6 + 7) + 8 + 9  # per query
    flops = 2 * (2 * (90 * 5 + 10 * 3) + 8 * n_keys)  # three passes have logits
    assert cost.min_seconds(test, slow_compute) == (pytest.approx(flops), "compute")
    # In a quarter of the layers, a query sees 6 keys at most.
    cost = replace(cost, windows={None: 0.75, 6: 0.25})
    n_bytes -= 2 * 16 * (0 + 2 + 3) // 4
    flops -= 2 * 8 * (0 + 0 + 1 + 2 + 3) // 4
    assert cost.min_seconds(test, slow_memory) == (pytest.approx(n_bytes), "memory")
    assert cost.min_seconds(test, slow_compute) == (pytest.approx(flops), "compute")


def test_lower_bound_counts_the_keys_that_the_layers_see(family):
    model = make_model(family)
    config = model.config
    cost = pass_cost(config, {n: a.shape for n, a in model.to_arrays().items()}, "float32")
    assert sum(cost.windows.values()) == 1
    positions = torch.arange(30, 40)  # of ten queries
    masks = [causal_mask(positions, 40, config.window(layer)) for layer in range(config.n_layers)]
    n_pairs = sum(int(mask.sum()) for mask in masks)
    n_seen = sum(int(mask.any(dim=0).sum()) for mask in masks)
    test = Workload(n_prompt=10, n_gen=0, n_depth=30, batch=1)
    n_bytes = cost.weight_bytes + 2 * 4 * config.n_kv_heads * config.head_dim * n_seen
    slow_memory = PeakRates(read_bytes=1, bytes_per_second=1.0, flops_per_second=1e30)
    assert cost.min_seconds(test, slow_memory)[0] == pytest.approx(n_bytes)
    flops = 2 * (10 * cost.weights + cost.output_weights)
    flops += 4 * config.n_heads * config.head_dim * n_pairs
    slow_compute = PeakRates(read_bytes=1, bytes_per_second=1e30, flops_per_second=1.0)
    assert cost.min_seconds(test, slow_compute)[0] == pytest.approx(flops)


class BusyTorch:
    """A torch whose products take 4 ticks on one thread, and 1000 on two: one CPU is occupied."""

    float32 = bfloat16 = dtype = None
    int8 = "int8"

    def __init__(self, clock):
        self.clock, self.seconds = clock, 4

    def set_num_threads(self, n):
        self.seconds = {1: 4, 2: 1000}[n]

    def ones(self, *_, **__):
        return self

    sum = __matmul__ = __getitem__ = lambda self, *_: self

    def item(self):
        for _ in range(self.seconds):
            next(self.clock)


def test_peak_rates_are_the_best_measured(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setitem(sys.modules, "torch", BusyTorch(clock))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    options = {"device": "cpu", "threads": 2, "dtype": "float32", "seconds": 4000}
    peak = measure_peak_rates(1 << 20, **options)
    assert peak.read_bytes == 1 << 20
    assert peak.bytes_per_second == (1 << 20) / 5
    assert peak.flops_per_second == 2 * 768**3 / 5


def test_every_combination_is_measured(trained):
    setups = open_setups(
        trained, kinds=["torch", "auto"], threads=[1, 2], seed=1, measure_peaks=False
    )
    assert [setup.threads for setup in setups] == [1, 2, 1, 2]
    assert setups[0].engine == "torch"
    done = []
    results = sweep(setups, [PP, TG], trials=2, progress=done.append)
    assert done == [0.5, 1.0]
    order = [(s.engine, r.threads, r.label) for s, r in results]
    assert order == [(s.engine, s.threads, label) for s in setups for label in ("pp8", "tg3")]
    assert all(len(r.seconds.seconds) == 2 for _, r in results)
    with pytest.raises(UsageError, match="at least 8"):
        compare_backends(setups[0], setups[0].backend, "self", [PP], trials=7)
    _, ((ours, theirs, difference),) = compare_backends(
        setups[0], setups[0].backend, "self", [PP], trials=8
    )
    assert (ours.engine, theirs.engine, difference.label) == ("torch", "self", "pp8")
    assert math.isfinite(difference.ratio.high)
    assert math.isfinite(difference.noise.high)
