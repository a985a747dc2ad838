"""A run's losses and learning rate in the terminal, over its steps and minutes.

Color only repeats what characters show: dots are the training loss, `○` the validation loss,
`●` its minimum.
"""

import bisect

from rich.text import Text

from tgen.drawing.braille_plot import DIM, MARGIN, Axis, Canvas, decimals, label_line, with_axis
from tgen.drawing.curve_plot import Curve, CurvePlot
from tgen.reports.number_format import count
from tgen.reports.training_curves import TrainingCurves

MIN_WIDTH = 60  # columns
_LOSS_ROWS, _RATE_ROWS = 13, 2
_TRAINING, _VALIDATION, _BEST, _RATE = "cyan", "yellow", "bold green", "magenta"
_SKIPPED = 0.05  # share of steps ignored by the loss axis: the steep start would flatten the rest


def training_plot(curves: TrainingCurves) -> CurvePlot:
    """Return the training and the validation loss as curves."""
    factor = curves.bits_per_nat or 1.0
    mean = f", {curves.smoothing:,}-step mean" if curves.smoothing > 1 else ""
    losses = [loss * factor for loss in curves.losses]
    drawn = [Curve(label=f"training{mean}", color=0, x=curves.steps, y=losses)]
    if curves.evaluation_steps:
        drawn.append(
            Curve(label="validation", color=1, x=curves.evaluation_steps, y=curves.evaluation_bits)
        )
    unit = "bits/byte" if curves.bits_per_nat else "nats/token"
    return CurvePlot(title="training", x_name="step", y_name=unit, curves=drawn)


def training_figure(curves: TrainingCurves, *, width: int) -> list[Text]:
    """Return lines of at most `width` columns (but at least MIN_WIDTH)."""
    columns, plot = max(MIN_WIDTH, width) - MARGIN, training_plot(curves)
    steps = Axis(low=0, high=curves.steps[-1], dots=2 * columns)
    margin = " " * (MARGIN - 1)
    return [
        _legend(plot),
        *_loss_lines(plot, curves.best_step, steps, columns),
        Text(margin + "├─ learning rate ".ljust(columns + 1, "─"), DIM),
        *_rate_lines(curves, steps, columns),
        Text(margin + "└" + "─" * columns, DIM),
        *_step_labels(curves, steps, columns),
        Text(),
        *map(Text, _totals(curves, width=MARGIN + columns)),
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


def _legend(plot: CurvePlot) -> Text:
    text = Text(plot.y_name.rjust(MARGIN - 1))
    text.append("  ").append("⠒⠒", _TRAINING).append(f" {plot.curves[0].label}")
    if len(plot.curves) > 1:
        text.append("  ").append("○", _VALIDATION).append(" validation")
        text.append("  ").append("●", _BEST).append(" best")
    return text


def _loss_lines(plot: CurvePlot, best_step: int | None, steps: Axis, columns: int) -> list[Text]:
    training, *others = plot.curves
    evaluations = [point for one in others for point in zip(one.x, one.y, strict=True)]
    visible = [*training.y[int(len(training.y) * _SKIPPED) :], *(y for _, y in evaluations)]
    margin = 0.04 * (max(visible) - min(visible))
    values = Axis(low=min(visible) - margin, high=max(visible) + margin, dots=4 * _LOSS_ROWS)
    canvas = Canvas(columns, _LOSS_ROWS)
    line = [(steps.dot(s), values.dot(y)) for s, y in zip(training.x, training.y, strict=True)]
    canvas.line(line, _TRAINING)
    if line[0][1] >= values.dots:  # the curve starts above the axis
        canvas.mark(line[0][0], values.dots - 1, "↑", _TRAINING)
    evaluations.sort(key=lambda point: point[0] == best_step)  # drawn last: on top
    for step, value in evaluations:
        mark, style = ("●", _BEST) if step == best_step else ("○", _VALIDATION)
        canvas.mark(steps.dot(step), values.dot(value), mark, style)
    ticks = values.ticks(6)
    digits = decimals(ticks)
    return with_axis(canvas, {values.dot(tick) // 4: f"{tick:.{digits}f}" for tick in ticks})


def _rate_lines(curves: TrainingCurves, steps: Axis, columns: int) -> list[Text]:
    highest = max(curves.learning_rates)
    values = Axis(low=0.0, high=highest, dots=4 * _RATE_ROWS)
    canvas = Canvas(columns, _RATE_ROWS)
    points = zip(curves.steps, curves.learning_rates, strict=True)
    canvas.line([(steps.dot(step), values.dot(rate)) for step, rate in points], _RATE)
    return with_axis(canvas, {1: f"{highest:.2g}", 0: "0"})


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
        label_line("step", tick_columns, [f"{tick:,}" for tick in ticks], columns),
        label_line("minutes", tick_columns, minutes, columns),
    ]
