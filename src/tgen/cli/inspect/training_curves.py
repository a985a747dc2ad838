"""`--view training`: the training log as curves and a terminal figure. Does not import torch.

Color only repeats what characters show: dots are the training loss, `○` the validation loss,
`●` its minimum.
"""

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.text import Text

from tgen.cli import console
from tgen.cli.json_output import json_line
from tgen.cli.rich_console import out
from tgen.drawing.braille_plot import Axis, Canvas
from tgen.errors import TrainingError
from tgen.reports.json_text import json_value
from tgen.reports.number_format import count

MIN_WIDTH = 60  # columns
_PIPE_WIDTH = 80  # columns where stdout is not a terminal
_SMOOTHING_WINDOWS = 40  # per run: narrow enough for the curve's shape, wide enough against noise
_LOSS_ROWS, _RATE_ROWS = 13, 2
_LARGEST = 1e100  # largest number of a log: the plot's arithmetic stays finite
_MARGIN = 10  # columns left of the dots: a label, a space and the axis
_TRAINING, _VALIDATION, _BEST, _RATE, _DIM = "cyan", "yellow", "bold green", "magenta", "dim"
_SKIPPED = 0.05  # share of steps ignored by the loss axis: the steep start would flatten the rest


@dataclass(frozen=True, kw_only=True)
class TrainingCurves:
    """Series of a run: one value per step, or one per evaluation."""

    steps: list[int]
    seconds: list[float]  # training time by step
    losses: list[float]  # nats per token, smoothed
    smoothing: int  # steps averaged
    learning_rates: list[float]
    evaluation_steps: list[int]
    evaluation_losses: list[float]  # nats per token of the validation text
    bits_per_nat: float | None  # bits per byte for each nat per token; None: unknown
    best_step: int | None  # None: no evaluation yet
    best_bits_per_byte: float | None
    tokens: int | None  # trained on; None: the log has no plan
    median_tokens_per_second: float
    n_sessions: int


def print_training_log(path: Path, *, json_output: bool, quiet: bool) -> None:
    """Print the training figure of the model directory `path`, or its log records as JSON."""
    from tgen.runs import log

    records = log.read(path)
    if json_output:
        record = {"schema": "tgen.inspect.training/1", "records": json_value(records)}
        console.print_status(f"{path}", quiet=quiet)
        console.write(json_line(record))
        return
    lines = training_lines(records)
    console.print_status(f"{path}", quiet=quiet)
    if out.is_terminal:
        console.show(*lines)
    else:
        console.write("".join(f"{line.plain}\n" for line in lines).encode())


def training_lines(records: Sequence[dict[str, Any]]) -> list[Text]:
    """Return the training figure of a log's records, for stdout's width."""
    width = out.width if out.is_terminal else _PIPE_WIDTH
    return training_figure(training_curves(records), width=width)


def training_curves(records: Sequence[dict[str, Any]]) -> TrainingCurves:
    """Return the curves of a log's records.

    Raises TrainingError if they contain no step, or a record lacks a required number.
    """
    # A step skipped for a non-finite loss or gradient has no loss.
    records = [r for r in records if r["kind"] != "StepReport" or r.get("loss", 0) is not None]
    steps = _numbers(records, "StepReport", "step")
    if not steps:
        raise TrainingError("the training log has no steps yet", "retry after the first evaluation")
    losses = _numbers(records, "StepReport", "loss")
    evaluation_steps = [int(step) for step in _numbers(records, "EvalReport", "step")]
    evaluation_losses = _numbers(records, "EvalReport", "loss")
    bits = _numbers(records, "EvalReport", "bits_per_byte")
    best = min(range(len(bits)), key=lambda i: bits[i], default=None)
    # Bits per byte and nats per token of one text have a constant ratio; the largest loss is exact.
    loss, bits_per_byte = max(zip(evaluation_losses, bits, strict=True), default=(0.0, 0.0))
    radius = len(steps) // _SMOOTHING_WINDOWS // 2
    return TrainingCurves(
        steps=[int(step) for step in steps],
        seconds=_numbers(records, "StepReport", "seconds"),
        losses=smooth(losses, radius),
        smoothing=2 * radius + 1,
        learning_rates=_numbers(records, "StepReport", "learning_rate"),
        evaluation_steps=evaluation_steps,
        evaluation_losses=evaluation_losses,
        bits_per_nat=bits_per_byte / loss if loss > 0 else None,
        best_step=None if best is None else evaluation_steps[best],
        best_bits_per_byte=None if best is None else bits[best],
        tokens=_count_tokens(records, int(steps[-1])),
        median_tokens_per_second=statistics.median(
            _numbers(records, "StepReport", "tokens_per_second")
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


def _count_tokens(records: Sequence[dict[str, Any]], last_step: int) -> int | None:
    """Return the tokens up to a step; each session may have another batch size."""
    columns = [
        [int(n) for n in _numbers(records, "PlanReport", name)]
        for name in ("resumed_at_step", "batch_size", "context_length")
    ]
    sessions = zip([*columns[0][1:], last_step], *columns, strict=False)
    return sum((end - start) * batch * context for end, start, batch, context in sessions) or None


def _numbers(records: Sequence[dict[str, Any]], kind: str, name: str) -> list[float]:
    values = [record.get(name) for record in records if record["kind"] == kind]
    for value in values:
        if not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
            raise TrainingError(
                f"training log: invalid {name} in a {kind} (got {value!r}, expected a number)",
                "train again: the log was edited or written by another version",
            )
    return [value for value in values if value is not None]


def training_figure(curves: TrainingCurves, *, width: int) -> list[Text]:
    """Return lines of at most `width` columns (but at least MIN_WIDTH)."""
    columns = max(MIN_WIDTH, width) - _MARGIN
    steps = Axis(low=0, high=curves.steps[-1], dots=2 * columns)
    margin = " " * (_MARGIN - 1)
    return [
        _legend(curves),
        *_loss_lines(curves, steps, columns),
        Text(margin + "├─ learning rate ".ljust(columns + 1, "─"), _DIM),
        *_rate_lines(curves, steps, columns),
        Text(margin + "└" + "─" * columns, _DIM),
        *_step_labels(curves, steps, columns),
        Text(),
        *map(Text, _totals(curves, width=_MARGIN + columns)),
    ]


def _totals(curves: TrainingCurves, *, width: int) -> list[str]:
    """Return the totals in one line, or in two where one is too long."""
    parts = [count(curves.steps[-1], "step")]
    if curves.tokens is not None:
        parts.append(f"{curves.tokens:,} tokens")
    parts.append(f"{curves.seconds[-1] / 60:,.1f} minutes")
    if curves.n_sessions > 1:
        parts.append(f"{curves.n_sessions} sessions")
    amount, parts = " · ".join(parts), []
    if curves.best_bits_per_byte is not None:
        parts.append(f"best {curves.best_bits_per_byte:.3f} bits/byte at step {curves.best_step:,}")
    parts.append(f"median {curves.median_tokens_per_second:,.0f} tokens/s")
    line = " · ".join([amount, *parts])
    return [line] if len(line) <= width else [amount, " · ".join(parts)]


def _legend(curves: TrainingCurves) -> Text:
    text = Text("bits/byte".rjust(_MARGIN - 1) if curves.bits_per_nat else "nats/token")
    mean = f", {curves.smoothing:,}-step mean" if curves.smoothing > 1 else ""
    text.append("  ").append("⠒⠒", _TRAINING).append(f" training{mean}")
    if curves.evaluation_steps:
        text.append("  ").append("○", _VALIDATION).append(" validation")
        text.append("  ").append("●", _BEST).append(" best")
    return text


def _loss_lines(curves: TrainingCurves, steps: Axis, columns: int) -> list[Text]:
    factor = curves.bits_per_nat or 1.0
    training = [loss * factor for loss in curves.losses]
    validation = [loss * factor for loss in curves.evaluation_losses]
    visible = training[int(len(training) * _SKIPPED) :] + validation
    margin = 0.04 * (max(visible) - min(visible))
    values = Axis(low=min(visible) - margin, high=max(visible) + margin, dots=4 * _LOSS_ROWS)
    canvas = Canvas(columns, _LOSS_ROWS)
    line = [(steps.dot(s), values.dot(y)) for s, y in zip(curves.steps, training, strict=True)]
    canvas.line(line, _TRAINING)
    if line[0][1] >= values.dots:  # the curve starts above the axis
        canvas.mark(line[0][0], values.dots - 1, "↑", _TRAINING)
    evaluations = list(zip(curves.evaluation_steps, validation, strict=True))
    evaluations.sort(key=lambda point: point[0] == curves.best_step)  # drawn last: on top
    for step, value in evaluations:
        mark, style = ("●", _BEST) if step == curves.best_step else ("○", _VALIDATION)
        canvas.mark(steps.dot(step), values.dot(value), mark, style)
    ticks = values.ticks(6)
    digits = _decimals(ticks)
    return _with_axis(canvas, {values.dot(tick) // 4: f"{tick:.{digits}f}" for tick in ticks})


def _rate_lines(curves: TrainingCurves, steps: Axis, columns: int) -> list[Text]:
    highest = max(curves.learning_rates)
    values = Axis(low=0.0, high=highest, dots=4 * _RATE_ROWS)
    canvas = Canvas(columns, _RATE_ROWS)
    points = zip(curves.steps, curves.learning_rates, strict=True)
    canvas.line([(steps.dot(step), values.dot(rate)) for step, rate in points], _RATE)
    return _with_axis(canvas, {1: f"{highest:.2g}", 0: "0"})


def _step_labels(curves: TrainingCurves, steps: Axis, columns: int) -> list[Text]:
    """Return the axis labels: round steps, and the training minutes at each."""
    ticks = [int(tick) for tick in steps.ticks(max(2, columns // 12)) if tick == int(tick)]
    tick_columns = [steps.dot(tick) // 2 for tick in ticks]
    seconds = [
        curves.seconds[bisect.bisect_left(curves.steps, tick)] if tick > 0 else 0.0
        for tick in ticks
    ]
    minutes = [f"{s / 60:.1f}" for s in seconds]
    return [
        _label_line("step", tick_columns, [f"{tick:,}" for tick in ticks], columns),
        _label_line("minutes", tick_columns, minutes, columns),
    ]


def _label_line(name: str, centers: Sequence[int], labels: Sequence[str], columns: int) -> Text:
    """Return labels centered on their columns, within the width."""
    line = ""
    for center, label in zip(centers, labels, strict=True):
        start = min(max(0, center - len(label) // 2), columns - len(label))
        line = line.ljust(start) + label
    return Text(f"{name:>{_MARGIN - 2}}  {line}", no_wrap=True)


def _with_axis(canvas: Canvas, labels: dict[int, str]) -> list[Text]:
    """Return the canvas behind a vertical axis with labels by row, counted from the bottom."""
    lines = []
    for i, dots in enumerate(canvas.lines()):
        label = labels.get(canvas.rows - 1 - i)
        axis = f"{label or '':>{_MARGIN - 2}} {'┤' if label else '│'}"
        lines.append(Text(no_wrap=True).append(axis, _DIM).append_text(dots))
        lines[-1].rstrip()
    return lines


def _decimals(ticks: Sequence[float]) -> int:
    """Return the decimals that distinguish adjacent ticks."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 0.01
    return next((n for n in range(6) if round(step, n) == round(step, 8)), 6)
