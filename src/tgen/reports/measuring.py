"""Timings, and what they were taken of."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Several trials of one thing."""

    seconds: list[float]
    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """One more round of trials is done; 0 was the warm-up."""

    trial: int
    trials: int


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """One text length of the cache benchmark."""

    length: int  # tokens before the one that is decoded
    prefill: Timing  # all of them in one pass, nothing cached before
    cached: Timing  # the next token with the cache
    uncached: Timing | None  # the next token from the whole text
    speedup: float | None  # uncached over cached, of the medians
    cache_bytes: int


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
