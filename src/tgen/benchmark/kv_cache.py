"""Speedup of the KV cache, and a check that it does not change the output.

Without a cache, decoding the next token of an n-token text takes a pass over all n + 1 tokens. With
it, the pass covers one token and reads n cached keys and values. The first cost grows with n, the
second hardly does, so the speedup grows with the length. Both use one engine with the same
weights: "uncached" rewinds it to 0 and extends it by the whole text. Trials of both, at all
lengths, are interleaved. Only `Engine.extend` is timed, without tokenization or sampling.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from tgen.benchmark.statistics import paired_ratio, timing
from tgen.config import SamplingConfig
from tgen.engine.base import Engine, reset
from tgen.errors import UsageError
from tgen.generation.loop import generate
from tgen.reports.benchmark import CacheVerdict, LengthReport, LinearFit, Timing, TrialReport

VERDICT_TOKENS = 128
_STEPS_PER_TRIAL = 5  # one token is short: a trial is the median of several


def default_lengths(context_length: int) -> list[int]:
    """Return the powers of two from 16 up to the context length."""
    lengths = [16 << i for i in range(30) if 16 << i < context_length]
    return [*lengths, context_length]


def sample_text(engine: Engine, start: Sequence[int], n_tokens: int, *, seed: int) -> list[int]:
    """Sample the text to time: `n_tokens` in total, after `start`, at temperature 1."""
    sampling = SamplingConfig(temperature=1.0, top_k=0, max_new_tokens=n_tokens, seed=seed)
    tokens = generate(engine, [start], sampling=sampling)
    return [*start, *(token.id for token in tokens)][:n_tokens]


def measure_lengths(
    engine: Engine, text: Sequence[int], lengths: Sequence[int], *, trials: int
) -> Iterator[TrialReport | LengthReport]:
    """Time, per length, the last token with and without the cache, and the prefill before it.

    A warmup round comes first. Raises UsageError for lengths that do not fit.
    """
    for length in lengths:
        if not 2 <= length <= min(engine.context_length, len(text)):
            raise UsageError(
                f"--length: must be between 2 and {engine.context_length}, the model's context "
                f"(got {length})",
                "remove --length to use powers of two",
            )
    reset(engine, 1)
    seconds: dict[tuple[str, int], list[float]] = {}
    cache_bytes: dict[int, int] = {}
    for trial in range(-1, trials):  # -1 is the warmup
        for length in lengths:
            before, last = text[: length - 1], text[length - 1 : length]
            times = {"prefill": _time(engine, 0, before)}
            steps = [_time(engine, length - 1, last) for _ in range(_STEPS_PER_TRIAL)]
            cache_bytes[length] = engine.cache_bytes
            times["cached"] = float(np.median(steps))
            times["uncached"] = _time(engine, 0, text[:length])
            if trial >= 0:
                for name, value in times.items():
                    seconds.setdefault((name, length), []).append(value)
        yield TrialReport(trial=trial + 1, trials=trials)
    for length in lengths:
        cached, uncached = (seconds[name, length] for name in ("cached", "uncached"))
        yield LengthReport(
            length=length,
            prefill=timing(seconds["prefill", length]),
            cached=timing(cached),
            uncached=timing(uncached),
            speedup=paired_ratio(cached, uncached, confidence=0.95),
            cache_bytes=cache_bytes[length],
        )


def fit_line(lengths: Sequence[int], timings: Sequence[Timing]) -> LinearFit:
    """Fit a line to the medians, weighted so that relative errors count equally."""
    medians = np.array([timing.median for timing in timings])
    if len(lengths) < 2:
        return LinearFit(intercept=float(medians[0]), slope=0.0, max_deviation=0.0)
    slope, intercept = np.polyfit(lengths, medians, 1, w=1 / medians)
    line = intercept + slope * np.array(lengths)
    deviation = float(np.abs(line / medians - 1).max())
    return LinearFit(intercept=float(intercept), slope=float(slope), max_deviation=deviation)


def verify_cache(engine: Engine, prompt: Sequence[int], n_tokens: int) -> CacheVerdict:
    """Decode greedily with and without the cache and compare tokens and logits."""
    n_tokens = min(n_tokens, engine.context_length - len(prompt))
    reset(engine, 1)
    cached = _decode(engine, prompt, n_tokens, kv_cache=True)
    uncached = _decode(engine, prompt, n_tokens, kv_cache=False)
    max_difference, first, gap = 0.0, None, None
    for i, ((token, logits), (other, other_logits)) in enumerate(
        zip(cached, uncached, strict=True)
    ):
        max_difference = max(max_difference, float(np.abs(logits - other_logits).max()))
        if token != other:
            second, best = np.sort(logits)[-2:]
            first, gap = i, float(best - second)
            break  # after this the texts differ, so the logits do
    return CacheVerdict(
        tokens=n_tokens,
        prompt_tokens=len(prompt),
        identical=first is None,
        first_difference=first,
        logit_gap=gap,
        max_logit_difference=max_difference,
    )


def _decode(
    engine: Engine, prompt: Sequence[int], n_tokens: int, *, kv_cache: bool
) -> list[tuple[int, np.ndarray]]:
    """Return each greedy token and its logits."""
    text = list(prompt)
    decoded = []
    engine.rewind([0])
    for _ in range(n_tokens):
        if not kv_cache:
            engine.rewind([0])
        (logits,) = engine.extend([text[engine.lengths[0] :]])
        text.append(int(logits.argmax()))
        decoded.append((text[-1], logits))
    return decoded


def _time(engine: Engine, n_cached: int, tokens: Sequence[int]) -> float:
    engine.rewind([n_cached])
    start = time.perf_counter()
    engine.extend([tokens])
    return time.perf_counter() - start
