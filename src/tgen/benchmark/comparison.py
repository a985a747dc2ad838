"""Is one faster than the other? Only what can be told from noise is said to be."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tgen.benchmark.statistics import paired_ratio, ratio
from tgen.benchmark.throughput import Workload
from tgen.errors import UsageError
from tgen.reports import Difference, Interval, ThroughputReport

_CONFIDENCE = 0.99
# What must be alike for two figures to be about the same thing.
_SAME = {
    "cpu_info": "processor",
    "processors": "number of processors",
    "gpu_info": "GPU",
    "family": "model's family",
    "model_n_params": "number of parameters",
}


def against(
    label: str, ours: Sequence[float], theirs: Sequence[float], again: Sequence[float]
) -> Difference:
    """Seconds of trials that took turns: ours, theirs, and ours again, which shows the noise.

    Theirs lies between ours in time, so that a machine that slows down steadily moves no ratio.
    """
    both = [math.sqrt(a * b) for a, b in zip(ours, again, strict=True)]
    found = paired_ratio(both, theirs, confidence=_CONFIDENCE)
    noise = paired_ratio(again, ours, confidence=_CONFIDENCE)
    verdict = _verdict(found, None)
    return Difference(label=label, ratio=found, noise=noise, machine=None, verdict=verdict)


def since(report: ThroughputReport, old: Mapping[str, Any]) -> Difference:
    """What changed since `old`, a row of an earlier run, which had another process and another
    hour: a change must go beyond what a yardstick says of the machine then and now."""
    now, then = report.seconds.seconds, _seconds(old["samples_ns"])
    yards = _seconds(old.get("yardstick_ns", []))
    machine = ratio(report.yards, yards, confidence=_CONFIDENCE) if report.yards and yards else None
    found = ratio(now, then, confidence=_CONFIDENCE)
    noise = ratio(now[::2], now[1::2], confidence=_CONFIDENCE) if len(now) > 1 else None
    verdict = _verdict(found, machine)
    return Difference(
        label=report.label, ratio=found, noise=noise, machine=machine, verdict=verdict
    )


def check_comparable(old: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Raises UsageError, naming the difference, for rows of another machine or model."""
    for row in old:
        for name, what in _SAME.items():
            if row.get(name) != facts[name]:
                raise UsageError(
                    f"the {what} was {row.get(name)!r} then, and is {facts[name]!r} now",
                    "compare runs of one model on one machine",
                )


def counterpart(
    old: Sequence[Mapping[str, Any]], test: Workload, *, engine: str, stored: str, threads: int
) -> Mapping[str, Any] | None:
    """The old row of the same test and setup."""
    wanted = {
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "engine": engine,
        "weights": stored,
        "n_threads": threads,
        "batch": test.batch,
    }
    same = [row for row in old if all(row.get(name) == v for name, v in wanted.items())]
    return same[-1] if same else None


def is_slower_by(difference: Difference, share: float) -> bool:
    """Whether speed is sure to have fallen by more than a share, beyond what the machine's has."""
    slowest, _ = _machines(difference.machine)
    return difference.ratio.high < (1 - share) * slowest


def _verdict(ratio: Interval, machine: Interval | None) -> str:
    slowest, fastest = _machines(machine)
    if ratio.low > fastest:
        return "faster"
    return "slower" if ratio.high < slowest else ""


def _machines(machine: Interval | None) -> tuple[float, float]:
    """The ratios that the machine alone may have brought: up to the square of the yardstick's.

    An engine waits for its threads at every turn, and suffers more than the yardstick does.
    """
    low, high = (machine.low, machine.high) if machine else (1.0, 1.0)
    return min(1.0, low**2), max(1.0, high**2)


def _seconds(nanoseconds: Sequence[float]) -> list[float]:
    return [ns / 1e9 for ns in nanoseconds]
