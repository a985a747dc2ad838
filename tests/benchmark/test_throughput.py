"""What is timed is what was asked for, in turns; and only what can be told from noise is said."""

import math
from dataclasses import replace

import numpy as np
import pytest

from support.models import make_model
from tgen.benchmark import peak_rates, throughput
from tgen.benchmark.comparison import (
    against,
    check_comparable,
    counterpart,
    is_slower_by,
    since,
)
from tgen.benchmark.peak_rates import measure_limits
from tgen.benchmark.report import throughput_report
from tgen.benchmark.roofline import PassCost, work_of
from tgen.benchmark.sweep import compare_arms, open_setups, sweep
from tgen.benchmark.throughput import EngineBackend, Trial, measure, random_tokens
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.reports import Limits

test_of = throughput.Workload
PP, TG = test_of(n_prompt=8), test_of(n_gen=3)


class Clock:
    """Time that passes only in the arms."""

    def __init__(self, monkeypatch):
        self.now = 0
        monkeypatch.setattr(throughput.time, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(throughput.time, "sleep", lambda _: None)


class FakeArm:
    """Takes as long as it is told, a little more or less each time, and remembers its calls."""

    def __init__(self, clock, log, name="", *, factor=1.0, seed=0):
        self.clock, self.log, self.name, self.factor = clock, log, name, factor
        self.random = np.random.default_rng(seed)
        self.cache_bytes = 80
        self.runs_on = name

    def _pass(self, what, nanoseconds):
        self.log.append((self.name, what))
        self.clock.now += round(nanoseconds * self.factor * self.random.lognormal(0, 0.03))

    def prepare(self, _):
        self.log.append((self.name, "prepare"))
        self.clock.now += 10**12  # not in the clock

    def prompt(self, test):
        self._pass(f"prompt {test.n_prompt}", 10**7 * test.n_prompt)

    def step(self):
        self._pass("step", 10**8)


def test_trials_take_turns_forth_and_back_after_one_that_warms_up(monkeypatch):
    log = []
    clock = Clock(monkeypatch)
    arms = FakeArm(clock, log, "a"), FakeArm(clock, log, "b")
    rounds = list(measure([(arms[0], PP), (arms[1], TG)], trials=2))
    runs = [name for name, what in log if what == "prepare"]
    # An arm that was not the one before is warmed, which is not in the clock.
    assert runs == ["a", *"bb", "b", *"aa", "a", *"bb"]
    assert log.count(("a", "prompt 8")) == 3 + 1
    assert log.count(("b", "step")) == 9 + 6
    assert [len(found) for found in rounds] == [2, 2]
    for a, b in rounds:
        assert 0.07 < a.seconds < 0.09
        assert (a.steps, b.prompt) == (0, 0)
        assert 0.2 < b.seconds < 0.4


def test_an_engine_reads_the_same_tokens_and_keeps_the_depth(family):
    engine = TorchEngine(make_model(family))
    tokens = random_tokens(300, 48, seed=1)
    assert tokens == random_tokens(300, 48, seed=1) != random_tokens(300, 48, seed=2)
    arm = EngineBackend(engine, tokens)
    passed = []
    honest = engine.extend

    def extend(rows, **options):
        passed.append([list(row) for row in rows])
        return honest(rows, **options)

    engine.extend = extend
    test = test_of(n_prompt=5, n_gen=2, n_depth=7, batch=3)
    trials = [throughput.run(arm, test) for _ in range(2)]
    parts = [tokens[:7], tokens[7:12], tokens[12:13], tokens[13:14]]
    once = [[part] * 3 for part in parts]
    assert passed == [*once, *once[1:]]  # the depth is read once
    assert trials[0].cache_bytes == 3 * 14 * engine.model.config.cache_bytes_per_token
    throughput.run(arm, test_of(n_gen=1))
    assert engine.lengths == [1]


def test_labels_are_llama_benchs_and_what_does_not_fit_is_refused():
    assert [PP.label, TG.label] == ["pp8", "tg3"]
    assert test_of(n_prompt=512, n_gen=128, n_depth=4096).label == "pp512+tg128 @ d4096"
    for test, context in [(test_of(), 99), (test_of(n_prompt=4, n_gen=4, n_depth=4), 11)]:
        with pytest.raises(UsageError):
            test.check(context)
    test_of(n_prompt=4, n_gen=4, n_depth=4).check(12)
    with pytest.raises(UsageError):
        list(measure([], trials=0))


def reported(seconds, test=PP):
    trials = [Trial(prompt=round(s * 1e9), steps=0, cache_bytes=80) for s in seconds]
    options = {"engine": "kernels", "stored": "float32", "threads": 2}
    return throughput_report(test, trials, least=(0.05, "memory"), **options)


def test_a_report_is_its_trials():
    report = reported([0.1, 0.2, 0.1, 0.1, 0.1, 0.1])
    assert report.rates == pytest.approx([80, 40, 80, 80, 80, 80])
    assert 40 <= report.rate.low <= report.rate.middle == pytest.approx(80)
    assert report.first_token.median == pytest.approx(0.1)
    assert report.cache_bytes_per_token == 10
    assert report.limit == pytest.approx(160)
    assert (report.bound_by, report.label) == ("memory", "pp8")
    assert not any("above the limit" in doubt for doubt in report.doubts)
    assert any("above the limit" in doubt for doubt in reported([0.04] * 6).doubts)


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (1.0, ""), (0.9, "faster")])
def test_a_change_of_a_tenth_is_told_from_none(monkeypatch, factor, verdict):
    """Ours is slowed on purpose, in turns with what it was; and in a run of another day."""
    log, n = [], 20
    clock = Clock(monkeypatch)
    ours = FakeArm(clock, log, "a", factor=factor, seed=1)
    theirs = FakeArm(clock, log, "a", seed=2)
    rounds = list(measure([(ours, PP), (theirs, PP), (ours, PP)], trials=n))
    a, b, again = ([trial.seconds for trial in column] for column in zip(*rounds, strict=True))
    found = against("pp8", a, b, again)
    assert found.verdict == verdict
    assert found.ratio.low <= 1 / factor <= found.ratio.high
    assert found.noise.low <= 1 <= found.noise.high
    then = {"samples_ns": [round(s * 1e9) for s in b]}
    assert since(reported(a), then).verdict == verdict
    # Where the machine itself has changed as much, nothing is said of the engine.
    yards = [1e-3 * factor * x for x in np.random.default_rng(3).lognormal(0, 0.01, n)]
    before = then | {"yardstick_ns": [round(1e9 * s / factor) for s in yards]}
    found = since(replace(reported(a), yards=yards), before)
    assert found.verdict == ""
    assert found.machine.low <= 1 / factor <= found.machine.high
    # Sure to be slower by a share only where all of the interval is.
    change = since(reported(a), then)
    assert is_slower_by(change, 0.03) == (factor == 1.1)
    assert not is_slower_by(change, 0.12)


def test_runs_of_another_machine_or_model_are_refused_by_name():
    facts = {
        "cpu_info": "A", "gpu_info": "", "family": "llama", "model_n_params": 1, "processors": 2,
    }  # fmt: skip
    check_comparable([facts | {"more": 1}], facts)
    for name, value in [("cpu_info", "B"), ("model_n_params", 2), ("family", "x")]:
        with pytest.raises(UsageError, match=str(value)):
            check_comparable([facts, facts | {name: value}], facts)
    test, setup = PP, {"engine": "kernels", "stored": "float32", "threads": 2}
    row = {
        "n_prompt": 8, "n_gen": 0, "n_depth": 0, "engine": "kernels", "weights": "float32",
        "n_threads": 2, "batch": 1,
    }  # fmt: skip
    assert counterpart([row | {"batch": 2}, row], test, **setup) == row
    for name in row:
        assert counterpart([row | {name: "other"}], test, **setup) is None


def test_the_least_time_is_counted_pass_by_pass(family):
    model = make_model(family)
    config, arrays = model.config, model.to_arrays()
    work = work_of(config, arrays, "float32")
    both = work.weights + work.output_weights
    assert work.weight_bytes == 4 * both
    narrow = work_of(config, arrays, "bfloat16", narrow_cache=True)
    assert (narrow.weight_bytes, narrow.key_bytes) == (2 * both, work.key_bytes / 2)
    # By what the model's own layers multiply.
    parameters = model.named_parameters()
    assert work.weights == sum(p.numel() for name, p in parameters if name.endswith("proj.weight"))
    assert work.output_weights == model.head.numel()
    slow_memory = Limits(read_bytes=1, bytes_per_second=1.0, flops=1e30)
    slow_sums = Limits(read_bytes=1, bytes_per_second=1e30, flops=1.0)
    work = PassCost(weights=90, output_weights=10, weight_bytes=400, key_flops=8, key_bytes=16)
    test = test_of(n_prompt=3, n_gen=2, n_depth=4, batch=2)
    read = (400 + 2 * 7 * 16) + (400 + 2 * 8 * 16) + (400 + 2 * 9 * 16)
    assert work.least(test, slow_memory) == (pytest.approx(read), "memory")
    seen = (5 + 6 + 7) + 8 + 9  # keys of each query
    flops = 2 * (2 * (90 * 5 + 10 * 3) + 8 * seen)  # three passes have logits
    assert work.least(test, slow_sums) == (pytest.approx(flops), "arithmetic")


def test_limits_are_the_best_of_all_that_was_tried(monkeypatch):
    clock = iter(range(10**6))
    slow = {1: 4, 2: 1000}  # of two threads, something else keeps one

    class Torch:
        float32 = bfloat16 = None
        threads = 1

        def set_num_threads(self, n):
            self.threads = n

        def ones(self, *_, **__):
            return FakeTensor(self)

    class FakeTensor:
        def __init__(self, torch):
            self.torch = torch

        def sum(self):
            return self

        __matmul__ = __getitem__ = lambda self, _: self

        def item(self):
            for _ in range(slow[self.torch.threads]):
                next(clock)

    monkeypatch.setattr(peak_rates, "torch", Torch())
    monkeypatch.setattr(peak_rates.time, "perf_counter", lambda: next(clock))
    options = {"device": "cpu", "threads": 2, "stored": "float32", "seconds": 4000}
    found = measure_limits(1 << 20, **options)
    assert found.read_bytes == 1 << 20
    assert found.bytes_per_second == (1 << 20) / 5
    assert found.flops == 2 * 768**3 / 5


def test_every_combination_is_measured(trained):
    setups = open_setups(trained, kinds=["torch", "auto"], threads=[1, 2], seed=1, limited=False)
    assert [setup.threads for setup in setups] == [1, 2, 1, 2]
    assert setups[0].engine == "torch"
    done = []
    found = sweep(setups, [PP, TG], trials=2, progress=done.append)
    assert done == [0.5, 1.0]
    places = [(s.engine, r.threads, r.label) for s, r in found]
    assert places == [(s.engine, s.threads, label) for s in setups for label in ("pp8", "tg3")]
    assert all(len(r.seconds.seconds) == 2 for _, r in found)
    with pytest.raises(UsageError, match="-r is 7"):
        compare_arms(setups[0], setups[0].arm, "self", [PP], trials=7)
    _, ((ours, theirs, difference),) = compare_arms(
        setups[0], setups[0].arm, "self", [PP], trials=8
    )
    assert (ours.engine, theirs.engine, difference.label) == ("torch", "self", "pp8")
    assert math.isfinite(difference.ratio.high)
    assert math.isfinite(difference.noise.high)
