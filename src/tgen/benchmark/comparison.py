"""Significant differences in speed, between two backends or from an earlier run.

The machine itself may be slower today: its probe tells.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tgen.benchmark.statistics import paired_ratio, ratio
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
