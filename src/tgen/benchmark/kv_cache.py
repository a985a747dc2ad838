"""What the key-value cache buys, and whether it changes anything.

Without a cache, the next token of a text of n tokens costs a pass over all n + 1 of them; with it,
a pass over one, which reads n keys and values. The first grows with n, the second hardly, so the
speed-up grows with length. Both arms are one engine with the same weights: "without" rewinds it to
0 and extends it with the whole text. Trials of all arms and lengths take turns, so that a machine
that slows down slows all of them. Only `Engine.extend` is inside the clock: no tokenising, no
sampling.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from tgen.benchmark.statistics import paired_ratio, timing
from tgen.config import SamplingConfig
from tgen.engine.base import Engine, reset
from tgen.errors import UsageError
from tgen.generation.loop import generate
from tgen.reports import Growth, LengthReport, Timing, TrialReport, Verdict

VERDICT_TOKENS = 128
_STEPS_PER_TRIAL = 5  # decoding one token is short: the median of a few is one trial


def default_lengths(context_length: int) -> list[int]:
    """16 and its doublings, up to the context."""
    lengths = [16 << i for i in range(30) if 16 << i < context_length]
    return [*lengths, context_length]


def own_text(engine: Engine, start: Sequence[int], n_tokens: int, *, seed: int) -> list[int]:
    """`n_tokens` of the model's own words after `start`, drawn at temperature 1: what is timed."""
    sampling = SamplingConfig(temperature=1.0, top_k=0, max_new_tokens=n_tokens, seed=seed)
    tokens = generate(engine, [start], sampling=sampling)
    return [*start, *(token.id for token in tokens)][:n_tokens]


def measure(
    engine: Engine, text: Sequence[int], lengths: Sequence[int], *, trials: int
) -> Iterator[TrialReport | LengthReport]:
    """Times the last token of texts of each length, with and without the cache, and the prefill of
    all tokens before it.

    One round before the trials warms up. Raises UsageError for lengths that do not fit.
    """
    for length in lengths:
        if not 2 <= length <= min(engine.context_length, len(text)):
            raise UsageError(
                f"length {length} does not fit a context of {engine.context_length}",
                f"lengths go from 2 to {engine.context_length}",
            )
    if trials < 1:
        raise UsageError(f"trials is {trials}", "at least one trial is needed")
    reset(engine, 1)
    seconds: dict[tuple[str, int], list[float]] = {}
    cache_bytes: dict[int, int] = {}
    for trial in range(-1, trials):  # -1 warms up
        for length in lengths:
            before, last = text[: length - 1], text[length - 1 : length]
            times = {"prefill": _time(engine, 0, before)}
            steps = [_time(engine, length - 1, last) for _ in range(_STEPS_PER_TRIAL)]
            cache_bytes[length] = engine.cache_bytes
            times["cached"] = float(np.median(steps))
            times["uncached"] = _time(engine, 0, text[:length])
            if trial >= 0:
                for arm, took in times.items():
                    seconds.setdefault((arm, length), []).append(took)
        yield TrialReport(trial=trial + 1, trials=trials)
    for length in lengths:
        cached, uncached = (seconds[arm, length] for arm in ("cached", "uncached"))
        yield LengthReport(
            length=length,
            prefill=timing(seconds["prefill", length]),
            cached=timing(cached),
            uncached=timing(uncached),
            speedup=paired_ratio(cached, uncached, confidence=0.95),
            cache_bytes=cache_bytes[length],
        )


def growth(lengths: Sequence[int], timings: Sequence[Timing]) -> Growth:
    """The line through the medians: what a token costs whatever the length, and what each token of
    the text adds. Every length counts alike, in shares of its own time."""
    medians = np.array([timing.median for timing in timings])
    if len(lengths) < 2:
        return Growth(flat=float(medians[0]), per_token=0.0, deviation=0.0)
    per_token, flat = np.polyfit(lengths, medians, 1, w=1 / medians)
    line = flat + per_token * np.array(lengths)
    deviation = float(np.abs(line / medians - 1).max())
    return Growth(flat=float(flat), per_token=float(per_token), deviation=deviation)


def compare(engine: Engine, prompt: Sequence[int], n_tokens: int) -> Verdict:
    """Decodes greedily with and without the cache and compares tokens and logits."""
    n_tokens = min(n_tokens, engine.context_length - len(prompt))
    reset(engine, 1)
    cached = _greedy(engine, prompt, n_tokens, kv_cache=True)
    plain = _greedy(engine, prompt, n_tokens, kv_cache=False)
    worst, first, gap = 0.0, None, None
    for i, ((token, logits), (other, other_logits)) in enumerate(zip(cached, plain, strict=True)):
        worst = max(worst, float(np.abs(logits - other_logits).max()))
        if token != other:
            second, best = np.sort(logits)[-2:]
            first, gap = i, float(best - second)
            break  # from here on the texts differ, and so do the logits
    return Verdict(
        tokens=n_tokens,
        prompt_tokens=len(prompt),
        identical=first is None,
        first_difference=first,
        gap=gap,
        max_logit_difference=worst,
    )


def _greedy(
    engine: Engine, prompt: Sequence[int], n_tokens: int, *, kv_cache: bool
) -> list[tuple[int, np.ndarray]]:
    """Each greedy token with the logits that it was taken from."""
    text = list(prompt)
    out = []
    engine.rewind([0])
    for _ in range(n_tokens):
        if not kv_cache:
            engine.rewind([0])
        (logits,) = engine.extend([text[engine.lengths[0] :]])
        text.append(int(logits.argmax()))
        out.append((text[-1], logits))
    return out


def _time(engine: Engine, held: int, tokens: Sequence[int]) -> float:
    engine.rewind([held])
    start = time.perf_counter()
    engine.extend([tokens])
    return time.perf_counter() - start
