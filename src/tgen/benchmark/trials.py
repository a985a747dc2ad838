"""Speed trials, interleaved after a warmup round, and the significance of differences in speed.

A pause separates trials with different thread pools. Speeds of two backends are compared, or one
with that of an earlier run; a probe of the machine's speed tells whether the machine has changed.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from tgen.benchmark.backend import Backend, Workload
from tgen.benchmark.statistics import (
    bootstrap,
    hodges_lehmann,
    paired_ratio,
    ratio,
    timing,
    timing_warnings,
)
from tgen.errors import UsageError
from tgen.reports.benchmark import Difference, Interval, ThroughputReport

_CONFIDENCE = 0.99
# Fields that must be equal for a comparison.
_SAME = {
    "cpu_info": "CPU",
    "n_cpus": "number of CPUs",
    "gpu_info": "GPU",
    "family": "model family",
    "model_n_params": "number of parameters",
}
_TOO_FAST = "faster than the measured peak rates: another process ran while those were measured"

_WARMUP_STEPS = 8
_PAUSE = 0.25  # seconds, until the previous backend's threads stop spinning
_PROBE_BYTES = 4 << 20  # per thread
_PROBE_REPEATS = 3


def compare_paired(
    label: str, ours: Sequence[float], theirs: Sequence[float], repeated: Sequence[float]
) -> Difference:
    """Compare the seconds of interleaved trials: ours, theirs, and ours repeated.

    The repetition measures the noise. Theirs ran between the two of ours, so a steady slowdown of
    the machine does not change the ratio.
    """
    both = [math.sqrt(a * b) for a, b in zip(ours, repeated, strict=True)]
    speed = paired_ratio(both, theirs, confidence=_CONFIDENCE)
    noise = paired_ratio(repeated, ours, confidence=_CONFIDENCE)
    return Difference(
        label=label, ratio=speed, noise=noise, probe_ratio=None, verdict=_verdict(speed, None)
    )


def compare_with_saved(report: ThroughputReport, saved: Mapping[str, Any]) -> Difference:
    """Compare a report with a record of an earlier run.

    Another process at another time: the change must exceed the change of the machine probe.
    """
    now, then = report.seconds.seconds, [ns / 1e9 for ns in saved["samples_ns"]]
    probe_now, probe_then = report.probe_seconds, [ns / 1e9 for ns in saved.get("probe_ns", [])]
    speed = ratio(now, then, confidence=_CONFIDENCE)
    noise = ratio(now[::2], now[1::2], confidence=_CONFIDENCE) if len(now) > 1 else None
    machine = None
    if probe_now and probe_then:
        machine = ratio(probe_now, probe_then, confidence=_CONFIDENCE)
    return Difference(
        label=report.label,
        ratio=speed,
        noise=noise,
        probe_ratio=machine,
        verdict=_verdict(speed, machine),
    )


def check_comparable(saved: Sequence[Mapping[str, Any]], current: Mapping[str, Any]) -> None:
    """Raise UsageError if the saved records are of another machine or model."""
    for record in saved:
        for name, description in _SAME.items():
            if record.get(name) != current[name]:
                raise UsageError(
                    f"--compare: the {description} is {current[name]!r}, but was "
                    f"{record.get(name)!r} in the saved run",
                    "compare runs of the same model on the same machine",
                )


def is_slower_by(difference: Difference, fraction: float) -> bool:
    """Return whether speed fell significantly by more than a fraction, machine drift excluded."""
    slowest, _ = _machine_drift(difference.probe_ratio)
    return difference.ratio.high < (1 - fraction) * slowest


def _verdict(speed: Interval, probe_ratio: Interval | None) -> str:
    slowest, fastest = _machine_drift(probe_ratio)
    if speed.low > fastest:
        return "faster"
    return "slower" if speed.high < slowest else ""


def _machine_drift(probe_ratio: Interval | None) -> tuple[float, float]:
    """Return the speed ratios that the machine alone may cause: up to the probe ratio squared.

    An engine waits for its threads after every phase, so it suffers more than the probe does.
    """
    low, high = (probe_ratio.low, probe_ratio.high) if probe_ratio else (1.0, 1.0)
    return min(1.0, low**2), max(1.0, high**2)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a workload, in nanoseconds."""

    prefill: int
    decode: int
    cache_bytes: int | None

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return (self.prefill + self.decode) / 1e9


def run_trials(pairs: Sequence[tuple[Backend, Workload]], *, trials: int) -> Iterator[list[Trial]]:
    """Yield rounds of one trial per pair, in the order of `pairs`, after a warmup round.

    Raises UsageError for fewer than one trial.
    """
    if trials < 1:
        raise UsageError(f"--trials: must be at least 1 (got {trials})", "use -r 10")
    previous: Backend | None = None
    for number in range(-1, trials):
        results: dict[int, Trial] = {}
        order = list(range(len(pairs)))
        for i in order if number % 2 else reversed(order):
            backend, workload = pairs[i]
            if previous is not None and previous.thread_pool != backend.thread_pool:
                time.sleep(_PAUSE)
                _warm_up(backend, workload)
            results[i], previous = run_trial(backend, workload), backend
        if number >= 0:
            yield [results[i] for i in order]


def _warm_up(backend: Backend, workload: Workload) -> None:
    """Warm up caches, clock rates and sleeping threads after a pause."""
    backend.prepare(workload)
    if workload.n_prompt:
        backend.prefill(workload)
    for _ in range(min(workload.n_gen, _WARMUP_STEPS)):
        backend.step()


def run_trial(backend: Backend, workload: Workload) -> Trial:
    """Run a workload once."""
    backend.prepare(workload)
    begin = time.perf_counter_ns()
    if workload.n_prompt:
        backend.prefill(workload)
    prefilled = time.perf_counter_ns()
    for _ in range(workload.n_gen):
        backend.step()
    end = time.perf_counter_ns()
    return Trial(prefill=prefilled - begin, decode=end - prefilled, cache_bytes=backend.cache_bytes)


class MachineProbe:
    """A constant NumPy workload, interleaved with the trials to measure the machine's speed.

    Each thread sums its own array, and the slowest thread counts: like an engine's forward
    pass, the probe waits for all threads, so it notices when another process occupies a CPU.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._arrays = [np.ones(_PROBE_BYTES // 4, np.float32) for _ in range(threads)]

    def measure_seconds(self) -> float:
        """Return the best of three: the engine's threads may still be spinning after a trial."""
        with ThreadPoolExecutor(self._threads) as pool:
            seconds = []
            for _ in range(_PROBE_REPEATS):
                begin = time.perf_counter()
                list(pool.map(np.add.reduce, self._arrays))
                seconds.append(time.perf_counter() - begin)
        return min(seconds)


def throughput_report(
    workload: Workload,
    trials: Sequence[Trial],
    *,
    engine: str,
    dtype: str,
    threads: int,
    bound: tuple[float, str] | None,
    probe_seconds: Sequence[float] = (),
) -> ThroughputReport:
    """Summarize the trials of a workload.

    `bound` is the lower bound in seconds and its resource (`PassCost.min_seconds`), or None.
    `probe_seconds` are those of the machine probe, interleaved with the trials.
    """
    seconds = [trial.seconds for trial in trials]
    n_tokens = workload.batch * (workload.n_prompt + workload.n_gen)
    rates = [n_tokens / one for one in seconds]
    n_bytes = trials[-1].cache_bytes
    n_cached = workload.batch * workload.n_tokens
    too_fast = bound is not None and min(seconds) < bound[0]
    return ThroughputReport(
        label=workload.label,
        engine=engine,
        dtype=dtype,
        threads=threads,
        batch=workload.batch,
        n_prompt=workload.n_prompt,
        n_gen=workload.n_gen,
        n_depth=workload.n_depth,
        seconds=timing(seconds),
        rate=hodges_lehmann(rates),
        bootstrap_rate=bootstrap(rates),
        first_token=timing([t.prefill / 1e9 for t in trials]) if workload.n_prompt else None,
        cache_bytes_per_token=None if n_bytes is None else n_bytes / n_cached,
        peak_rate=None if bound is None else n_tokens / bound[0],
        bound_by="" if bound is None else bound[1],
        probe_seconds=list(probe_seconds),
        warnings=[*timing_warnings(seconds), *([_TOO_FAST] if too_fast else [])],
    )
