"""Speed trials, interleaved after a warmup round.

A pause separates trials with different thread pools. A probe of the machine's speed tells whether
the machine has changed.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from tgen.benchmark.backend import Backend
from tgen.benchmark.statistics import bootstrap, hodges_lehmann, timing, timing_warnings
from tgen.benchmark.workload import Workload
from tgen.reports.benchmark import ThroughputReport

_TOO_FAST = "faster than the measured peak rates: another process ran while those were measured"

_WARMUP_STEPS = 8
_PAUSE = 0.25  # seconds, until the previous backend's threads stop spinning
_PROBE_BYTES = 4 << 20  # per thread
_PROBE_REPEATS = 3


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
    """Yield rounds of one trial per pair, in the order of `pairs`, after a warmup round."""
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
        backend.extend(workload.n_prompt)
    for _ in range(min(workload.n_gen, _WARMUP_STEPS)):
        backend.extend(1)


def run_trial(backend: Backend, workload: Workload) -> Trial:
    """Run a workload once."""
    backend.prepare(workload)
    begin = time.perf_counter_ns()
    if workload.n_prompt:
        backend.extend(workload.n_prompt)
    prefilled = time.perf_counter_ns()
    for _ in range(workload.n_gen):
        backend.extend(1)
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
        **asdict(workload),
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
