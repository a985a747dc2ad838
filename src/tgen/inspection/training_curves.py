"""What a run's log says as series of numbers: the losses, the rate, the best point, the pace."""

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tgen.errors import TrainingError
from tgen.reports import TrainingCurves

_SMOOTHED = 40  # windows across a run: narrow enough for its shape, wide enough against the noise


def training_curves(records: Sequence[dict[str, Any]]) -> TrainingCurves:
    """The curves of a log's records.

    Raises TrainingError if they hold no step, or one of them lacks a number that is needed.
    """
    # A step that was skipped, since something was not finite, has no loss.
    records = [r for r in records if r["kind"] != "StepReport" or r.get("loss", 0) is not None]
    steps = _numbers(records, "StepReport", "step")
    if not steps:
        raise TrainingError(
            "the run has no step in its log yet", "look again after its first evaluation"
        )
    losses = _numbers(records, "StepReport", "loss")
    evaluated = _numbers(records, "EvalReport", "step")
    held_out = _numbers(records, "EvalReport", "loss")
    bits = _numbers(records, "EvalReport", "bits_per_byte")
    best = min(range(len(bits)), key=lambda i: bits[i], default=None)
    reach = len(steps) // _SMOOTHED // 2
    return TrainingCurves(
        steps=[int(step) for step in steps],
        seconds=_numbers(records, "StepReport", "seconds"),
        losses=smooth(losses, reach),
        smoothed_over=2 * reach + 1,
        learning_rates=_numbers(records, "StepReport", "learning_rate"),
        evaluation_steps=[int(step) for step in evaluated],
        evaluation_losses=held_out,
        bits_per_nat=_bits_per_nat(held_out, bits),
        best_step=None if best is None else int(evaluated[best]),
        best_bits_per_byte=None if best is None else bits[best],
        tokens=_tokens(records, int(steps[-1])),
        median_tokens_per_second=statistics.median(
            _numbers(records, "StepReport", "tokens_per_second")
        ),
        sittings=sum(record["kind"] == "PlanReport" for record in records),
    )


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Each value's mean with `reach` neighbours on either side.

    Near the ends it is with as many as there are on both sides, so that no end is pulled inwards.
    """
    sums = [0.0, *accumulate(values)]
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        means.append((sums[i + near + 1] - sums[i - near]) / (2 * near + 1))
    return means


def _bits_per_nat(losses: Sequence[float], bits: Sequence[float]) -> float | None:
    """Bits per byte for each nat per token: one number for a text, since both count its losses.

    None: nothing was evaluated, or the losses are too small to tell.
    """
    loss, bits_per_byte = max(zip(losses, bits, strict=True), default=(0.0, 0.0))
    return bits_per_byte / loss if loss > 0 else None


def _tokens(records: Sequence[dict[str, Any]], step: int) -> int | None:
    """Tokens trained on up to `step`; None: the log does not tell."""
    batches = _numbers(records, "PlanReport", "batch_size")
    contexts = _numbers(records, "PlanReport", "context_length")
    return step * int(batches[-1] * contexts[-1]) if batches else None


def _numbers(records: Sequence[dict[str, Any]], kind: str, name: str) -> list[float]:
    """One field of all records of a kind."""
    values = [record.get(name) for record in records if record["kind"] == kind]
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TrainingError(
                f"a {kind} in the training log has {value!r} as its {name}",
                "the log was edited or is of another version; train anew for a new one",
            )
    return [value for value in values if value is not None]
