"""Prefill and decode throughput in llama-bench's terms: pp512, tg128, @ d4096.

A workload processes `n_prompt` tokens in one pass, then `n_gen` tokens one per pass, on top of
`n_depth` tokens in the KV cache. Only forward passes are timed. The token ids are random and drawn
beforehand, so sampling and tokenization do not count. After a warm-up round, the workloads of all
backends are interleaved in alternating order: a slowdown of the machine affects all of them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tgen.benchmark.statistics import bootstrap, hodges_lehmann, timing, timing_warnings
from tgen.engine.base import Engine, Logits, reset
from tgen.errors import UsageError
from tgen.reports.benchmark import ThroughputReport

_WARMUP_STEPS = 8
_PAUSE = 0.25  # seconds, until the previous backend's threads stop spinning
_TOO_FAST = "faster than the measured peak rates: another process ran while those were measured"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Numbers of tokens to process."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    batch: int = 1  # sequences, each with this many tokens

    @property
    def label(self) -> str:
        """The name in llama-bench's notation."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        """Tokens per sequence at the end, including the depth."""
        return self.n_depth + self.n_prompt + self.n_gen

    def check(self, context_length: int) -> None:
        """Raise UsageError if the workload is empty or does not fit the context."""
        if self.batch < 1:
            raise UsageError(f"--batch: must be at least 1 (got {self.batch})", "use --batch 1")
        if self.n_prompt + self.n_gen == 0:
            raise UsageError("the benchmark has no tokens", "set -p or -n above 0")
        if self.n_tokens > context_length:
            raise UsageError(
                f"{self.label} needs {self.n_tokens:,} tokens, but the model's context has "
                f"{context_length:,}",
                "use a smaller -p, -n or -d",
            )


class Backend(ABC):
    """A loaded model that runs a workload. Only `prefill` and `step` are timed."""

    thread_pool: str  # backends with the same value share their threads

    @abstractmethod
    def prepare(self, workload: Workload) -> None:
        """Leave `batch` sequences with `n_depth` cached tokens each; reuse a cached depth."""

    @abstractmethod
    def _extend(self, n: int) -> None:
        """Process `n` more tokens per sequence, until the next token's logits are computed."""

    @abstractmethod
    def logits(self) -> Logits:
        """Return a copy of the logits after the last pass, (B, V), float32."""

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of cached keys and values; None if unknown."""
        return None

    def prefill(self, workload: Workload) -> None:
        """Process the prompt of each sequence."""
        self._extend(workload.n_prompt)

    def step(self) -> None:
        """Process one more token per sequence."""
        self._extend(1)


class EngineBackend(Backend):
    """One of tgen's engines."""

    def __init__(
        self, engine: Engine, tokens: Sequence[int], *, threads: int | None = None
    ) -> None:
        """Feed `tokens`, one context of ids. `threads` is for torch; None does not change them."""
        self.engine, self.tokens, self._threads = engine, list(tokens), threads
        self._logits: Logits = np.zeros((1, 0), np.float32)
        self.thread_pool = engine.name

    def prepare(self, workload: Workload) -> None:
        """See `Backend.prepare`."""
        if self.engine.name == "torch":  # its number of threads is global
            from tgen.model.device import set_threads

            set_threads(self._threads)
        if len(self.engine.lengths) != workload.batch or self.engine.lengths[0] < workload.n_depth:
            reset(self.engine, workload.batch)
            if workload.n_depth:
                self._extend(workload.n_depth)
        self.engine.rewind([workload.n_depth] * workload.batch)

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of cached keys and values."""
        return self.engine.cache_bytes

    def logits(self) -> Logits:
        """See `Backend.logits`."""
        return self._logits

    def _extend(self, n: int) -> None:
        lengths = self.engine.lengths
        tokens = self.tokens[lengths[0] : lengths[0] + n]
        self._logits = self.engine.extend([tokens] * len(lengths))


def random_tokens(vocab_size: int, n: int, *, seed: int) -> list[int]:
    """Return `n` random token ids: the input of every backend."""
    return [int(i) for i in np.random.default_rng(seed).integers(vocab_size, size=n)]


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
    """Yield rounds of one trial per pair, in the order of `pairs`, after a warm-up round.

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

    `bound` is the lower bound in seconds and what sets it (`PassCost.min_seconds`), or None.
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
