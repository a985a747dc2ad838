"""The series of numbers in a run's log: losses, learning rates and what was spent until then."""

import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from tgen.errors import TrainingError
from tgen.reports.training_curves import TrainingCurves

_SMOOTHING_WINDOWS = 40  # per run: narrow enough for the curve's shape, wide enough against noise
_LARGEST = 1e100  # largest number of a log: the plot's arithmetic stays finite


def training_curves(records: Sequence[dict[str, Any]]) -> TrainingCurves:
    """Return the curves of a log's records.

    Raises TrainingError if they contain no step, or a record lacks a required number.
    """
    # A step skipped for a non-finite loss or gradient has no loss.
    records = [r for r in records if r["kind"] != "StepReport" or r.get("loss", 0) is not None]
    steps = numbers(records, "StepReport", "step")
    if not steps:
        raise TrainingError("the training log has no steps yet", "retry after the first evaluation")
    losses = numbers(records, "StepReport", "loss")
    evaluation_steps = [int(step) for step in numbers(records, "EvalReport", "step")]
    evaluation_losses = numbers(records, "EvalReport", "loss")
    bits = numbers(records, "EvalReport", "bits_per_byte")
    best = min(range(len(bits)), key=lambda i: bits[i], default=None)
    # Bits per byte and nats per token of one text have a constant ratio; the largest loss is exact.
    loss, bits_per_byte = max(zip(evaluation_losses, bits, strict=True), default=(0.0, 0.0))
    sessions = _read_sessions(records)
    radius = len(steps) // _SMOOTHING_WINDOWS // 2
    gaps = [last - first for first, last in pairwise(steps)]  # on a GPU, a report has several steps
    return TrainingCurves(
        steps=[int(step) for step in steps],
        seconds=numbers(records, "StepReport", "seconds"),
        losses=smooth(losses, radius),
        smoothing=(2 * radius + 1) * int(statistics.median(gaps or [1])),
        learning_rates=numbers(records, "StepReport", "learning_rate"),
        evaluation_steps=evaluation_steps,
        evaluation_seconds=numbers(records, "EvalReport", "seconds"),
        evaluation_tokens=[_count_tokens(sessions, step) for step in evaluation_steps],
        evaluation_bits=bits,
        bits_per_nat=bits_per_byte / loss if loss > 0 else None,
        best_step=None if best is None else evaluation_steps[best],
        best_bits_per_byte=None if best is None else bits[best],
        tokens=_count_tokens(sessions, int(steps[-1])) or None,
        median_tokens_per_second=statistics.median(
            numbers(records, "StepReport", "tokens_per_second")
        ),
        n_sessions=sum(record["kind"] == "PlanReport" for record in records),
    )


def smooth(values: Sequence[float], radius: int) -> list[float]:
    """Return each value's mean with `radius` neighbors per side.

    Near the ends the window shrinks on both sides, so that it stays centered.
    """
    sums = [0.0, *accumulate(values)]
    means = []
    for i in range(len(values)):
        r = min(radius, i, len(values) - 1 - i)
        means.append((sums[i + r + 1] - sums[i - r]) / (2 * r + 1))
    return means


def _read_sessions(records: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the step at which each session began, and its tokens per step."""
    names = ("resumed_at_step", "batch_size", "context_length")
    columns = [numbers(records, "PlanReport", name) for name in names]
    return [
        (int(step), int(batch * context)) for step, batch, context in zip(*columns, strict=True)
    ]


def _count_tokens(sessions: Sequence[tuple[int, int]], last_step: int) -> int:
    """Return the tokens up to a step; each session may have another batch size."""
    begun = [one for one in sessions if one[0] <= last_step]
    ends = [step for step, _ in begun[1:]] + [last_step]
    return sum((end - start) * n for (start, n), end in zip(begun, ends, strict=False))


def numbers(records: Sequence[dict[str, Any]], kind: str, name: str) -> list[float]:
    """Return a number of each record of a kind; raise TrainingError for anything else."""
    values = [record.get(name) for record in records if record["kind"] == kind]
    for value in values:
        if not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
            raise TrainingError(
                f"training log: invalid {name} in a {kind} (got {value!r}, expected a number)",
                "train again: the log was edited or written by another version",
            )
    return [value for value in values if value is not None]
