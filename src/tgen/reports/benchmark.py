"""Timings, and what they were taken of."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Several trials of one thing."""

    seconds: list[float]
    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile

    @property
    def spread(self) -> float:
        """Half the way from the 10th to the 90th percentile, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Where the middle of what was measured lies."""

    low: float
    middle: float
    high: float
    confidence: float  # that it lies from low to high

    @property
    def is_known(self) -> bool:
        """Whether there were trials enough to know it."""
        return 0 < self.low <= self.high < math.inf


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """One more round of trials is done; 0 was the warm-up."""

    trial: int
    trials: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was measured on."""

    cpu: str
    load: float | None  # processes that wanted a processor over the last minute; None: not known
    processors: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this machine's memory and arithmetic give, measured on the spot."""

    read_bytes: int  # read again and again
    bytes_per_second: float
    flops: float  # floating-point operations a second, of a matrix product


@dataclass(frozen=True, kw_only=True)
class ThroughputReport:
    """One test of one arm, in llama-bench's terms."""

    label: str  # pp512, tg128, pp512+tg128, with @ d4096 behind what is there already
    engine: str  # kernels, torch, transformers, llama.cpp
    stored: str  # how the weights are held
    threads: int
    batch: int  # rows that are computed together
    n_prompt: int  # tokens a row
    n_gen: int
    n_depth: int
    seconds: Timing  # of trials
    rate: Interval  # tokens of all rows a second, at 95 %
    bootstrapped: Interval  # the same of their mean, as others report it
    first_token: Timing | None  # seconds until the prompt is read; None: there is none
    cache_bytes_per_token: float | None  # measured; None: not known
    limit: float | None  # tokens a second that the machine's limits allow at most
    bound_by: str  # "memory" or "arithmetic"; "": no limit was measured
    yards: list[float]  # seconds that a yardstick took in turns with the trials
    doubts: list[str]

    @property
    def n_tokens(self) -> int:
        """That a trial is counted with."""
        return self.batch * (self.n_prompt + self.n_gen)

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each trial."""
        return [self.n_tokens / seconds for seconds in self.seconds.seconds]

    @property
    def median_rate(self) -> float:
        """Tokens a second of the median trial."""
        return self.n_tokens / self.seconds.median


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How many times as fast one arm is as another, or as it was."""

    label: str
    ratio: Interval  # at 99 %
    noise: Interval | None  # the same of one arm against itself; None: it was not repeated
    machine: Interval | None  # the same of a yardstick, which shows the machine; None: not known
    verdict: str  # "faster", "slower" or "": no difference that can be told from noise


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """One text length of the cache benchmark."""

    length: int  # tokens of the text with the one that is decoded, its last
    prefill: Timing  # all before that in one pass, nothing cached
    cached: Timing  # the last token with the cache
    uncached: Timing  # the last token from the whole text
    speedup: Interval  # uncached over cached, trial by trial, at 95 %
    cache_bytes: int  # of the whole text


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A line through times by length."""

    flat: float  # seconds
    per_token: float  # seconds that a token of the text adds
    deviation: float  # the largest of a median from the line, as its share

    def at(self, length: int) -> float:
        """Seconds that the line gives."""
        return self.flat + self.per_token * length


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether text with and without the cache is the same."""

    tokens: int  # compared
    prompt_tokens: int
    identical: bool
    first_difference: int | None  # which generated token
    gap: float | None  # between the two best logits there
    max_logit_difference: float


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """What weights in fewer bits cost: the same texts scored with both."""

    stored: str
    exact: str  # how the others are held
    tokens: int
    bits_per_byte: float
    exact_bits_per_byte: float
    max_logit_difference: float


@dataclass(frozen=True, kw_only=True)
class EndToEndReport:
    """What a one-shot command costs, from its spawning to its end."""

    phases: dict[str, Timing]  # in their order; those of one trial add up to its total
    total: Timing
    first: dict[str, float]  # seconds of each phase of the warm-up: disk caches were perhaps cold
    n_prompt: int  # tokens
    n_gen: int  # tokens; fewer than asked for where the model ended its text
    tokens_per_second: float  # generated, of the whole time, at its median
    peak_memory_bytes: int | None  # of the process, the most of all trials; None: not known
    text: bytes  # that was generated, greedily


@dataclass(frozen=True, kw_only=True)
class TrainingStepReport:
    """What a training step costs, and how much of the machine it uses."""

    device: str
    steps: int  # of all timed blocks
    tokens_per_step: int
    seconds: Timing  # a step, a value for each block
    tokens_per_second: float  # at the median
    flops_per_token: int  # that learning needs, see `benchmark.training_step`
    flops_per_second: float
    peak_flops: float | None  # floating-point operations a second that the machine could do
    utilisation: float | None  # flops_per_second / peak_flops
    peak_memory_bytes: int | None  # of the process since it began; None: not known
    device_memory_bytes: int | None  # most that torch held on the GPU; None: there is none
