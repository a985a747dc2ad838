"""Timings, confidence intervals and the conditions of a benchmark."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Trials of one operation, in seconds."""

    seconds: list[float]
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A point estimate and its confidence interval."""

    low: float
    estimate: float
    high: float
    confidence: float  # 0.95 or 0.99

    @property
    def is_finite(self) -> bool:
        """Whether there were enough trials for this confidence."""
        return 0 < self.low <= self.high < math.inf


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """One finished round of trials; round 0 is the warmup."""

    trial: int
    trials: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware and the package versions."""

    cpu: str
    load: float | None  # load average of the last minute; None if unknown
    n_cpus: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class PeakRates:
    """Peak memory bandwidth and compute rate, measured on this machine."""

    read_bytes: int  # size of the array that was read repeatedly
    bytes_per_second: float
    flops_per_second: float  # rate of a matrix product


@dataclass(frozen=True, kw_only=True)
class ThroughputReport:
    """One workload on one backend, in llama-bench's terms."""

    label: str  # pp512, tg128, pp512+tg128, with @ d4096 after a context of 4,096 tokens
    engine: str  # kernels, torch, transformers, llama.cpp
    dtype: str  # dtype of the weights
    threads: int
    batch: int  # sequences per batch
    n_prompt: int  # tokens per sequence
    n_gen: int
    n_depth: int
    seconds: Timing  # per trial
    rate: Interval  # tokens per second of the whole batch, 95% CI
    bootstrap_rate: Interval  # bootstrap 95% CI of the mean rate, as other tools report it
    first_token: Timing | None  # seconds until the prompt is processed; None without a prompt
    cache_bytes_per_token: float | None  # measured; None if unknown
    peak_rate: float | None  # tokens per second at the measured peak rates; None if not measured
    bound_by: str  # "memory" or "compute"; "" if the peak rates were not measured
    probe_seconds: list[float]  # machine probe, interleaved with the trials
    warnings: list[str]

    @property
    def n_tokens(self) -> int:
        """Tokens per trial."""
        return self.batch * (self.n_prompt + self.n_gen)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each trial."""
        return [self.n_tokens / seconds for seconds in self.seconds.seconds]

    @property
    def median_rate(self) -> float:
        """Tokens per second of the median trial."""
        return self.n_tokens / self.seconds.median


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Speed of one backend relative to another backend, or to an earlier run."""

    label: str
    ratio: Interval  # speed ratio, 99% CI; above 1 is faster
    noise: Interval | None  # the backend against itself; None if it ran once per round
    probe_ratio: Interval | None  # the machine probe against the earlier run's; None if unknown
    verdict: str  # "faster", "slower" or "" (not significant)


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """The KV cache benchmark at one text length."""

    length: int  # tokens, including the last one, which is decoded
    prefill: Timing  # all tokens but the last in one pass, empty cache
    cached: Timing  # the last token with the cache
    uncached: Timing  # the last token without the cache: the whole text in one pass
    speedup: Interval  # uncached over cached, paired by trial, 95% CI
    cache_bytes: int  # bytes for the whole text


@dataclass(frozen=True, kw_only=True)
class LinearFit:
    """Seconds as a linear function of the text length."""

    intercept: float  # seconds
    slope: float  # seconds per token
    max_deviation: float  # largest distance of a median from the line, as a fraction of it

    def at(self, length: int) -> float:
        """Return the predicted seconds."""
        return self.intercept + self.slope * length


@dataclass(frozen=True, kw_only=True)
class CacheVerdict:
    """Comparison of greedy decoding with and without the KV cache."""

    tokens: int  # compared
    prompt_tokens: int
    identical: bool
    first_difference: int | None  # index of the first generated token that differs
    logit_gap: float | None  # between the top two logits there
    max_logit_difference: float


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """Cost of storing weights in fewer bits: both dtypes score the same texts."""

    dtype: str
    reference_dtype: str
    tokens: int
    bits_per_byte: float
    reference_bits_per_byte: float
    max_logit_difference: float


@dataclass(frozen=True, kw_only=True)
class EndToEndReport:
    """Phases of a one-shot command, from spawning the process to its exit."""

    phases: dict[str, Timing]  # in order; the phases of one trial add up to its total
    total: Timing
    warmup: dict[str, float]  # seconds of each phase of the first run: disk caches may be cold
    n_prompt: int  # tokens
    n_gen: int  # tokens; fewer than requested if the model ended the text
    tokens_per_second: float  # generated tokens over the median total
    peak_memory_bytes: int | None  # largest RSS of the process over all trials; None if unknown
    text: bytes  # greedy output


@dataclass(frozen=True, kw_only=True)
class TrainingStepReport:
    """Duration of a training step and its use of the machine."""

    device: str
    precision: str  # of the inputs of products
    steps: int  # total number of timed steps
    tokens_per_step: int
    seconds: Timing  # per step, one value per timed block
    tokens_per_second: float  # at the median
    flops_per_token: int  # needed by training, see `benchmark.training_step`
    flops_per_second: float
    peak_flops: float | None  # peak FLOP/s of the machine
    utilization: float | None  # flops_per_second / peak_flops
    peak_memory_bytes: int | None  # RSS of the process since its start; None if unknown
    device_memory_bytes: int | None  # most that torch allocated on the GPU; None without a GPU
