"""How a run went, in about 20 rows: losses over steps and minutes, the rate, the figures.

Colour only repeats what the characters say: a line of dots is the training loss, `○` the held-out
text, `●` its best point.
"""

import bisect
from collections.abc import Sequence

from rich.text import Text

from tgen.cli.render.braille_plot import Axis, Canvas
from tgen.reports import TrainingCurves

MIN_WIDTH = 60  # columns
_LOSS_ROWS, _RATE_ROWS = 13, 2
_MARGIN = 10  # columns left of the dots: a label, a space and the axis
_TRAINING, _HELD_OUT, _BEST, _RATE, _FAINT = "cyan", "yellow", "bold green", "magenta", "dim"
_FALL = 0.05  # of the steps: the first, steep part, which must not flatten the rest


def training_figure(curves: TrainingCurves, *, width: int) -> list[Text]:
    """Lines of text, at most `width` columns wide (but no narrower than MIN_WIDTH)."""
    columns = max(MIN_WIDTH, width) - _MARGIN
    steps = Axis(low=0, high=curves.steps[-1], dots=2 * columns)
    margin = " " * (_MARGIN - 1)
    return [
        _legend(curves),
        *_losses(curves, steps, columns),
        Text(margin + "├─ learning rate ".ljust(columns + 1, "─"), _FAINT),
        *_rate(curves, steps, columns),
        Text(margin + "└" + "─" * columns, _FAINT),
        *_step_labels(curves, steps, columns),
        Text(),
        *map(Text, _figures(curves, width=_MARGIN + columns)),
    ]


def _figures(curves: TrainingCurves, *, width: int) -> list[str]:
    """The run in one line, or in two where it is too long."""
    parts = [f"{curves.steps[-1]:,} steps"]
    if curves.tokens is not None:
        parts.append(f"{curves.tokens:,} tokens")
    parts.append(f"{curves.seconds[-1] / 60:,.1f} minutes")
    if curves.sittings > 1:
        parts.append(f"{curves.sittings} sittings")
    amount, parts = " · ".join(parts), []
    if curves.best_bits_per_byte is not None:
        parts.append(f"best {curves.best_bits_per_byte:.3f} bits/byte at step {curves.best_step:,}")
    parts.append(f"median {curves.median_tokens_per_second:,.0f} tokens/s")
    both = " · ".join([amount, *parts])
    return [both] if len(both) <= width else [amount, " · ".join(parts)]


def _legend(curves: TrainingCurves) -> Text:
    text = Text("bits/byte".rjust(_MARGIN - 1) if curves.bits_per_nat else "nats/token")
    over = f", {curves.smoothed_over:,}-step mean" if curves.smoothed_over > 1 else ""
    text.append("  ").append("⠒⠒", _TRAINING).append(f" training{over}")
    if curves.evaluation_steps:
        text.append("  ").append("○", _HELD_OUT).append(" held out")
        text.append("  ").append("●", _BEST).append(" best")
    return text


def _losses(curves: TrainingCurves, steps: Axis, columns: int) -> list[Text]:
    factor = curves.bits_per_nat or 1.0
    training = [loss * factor for loss in curves.losses]
    held_out = [loss * factor for loss in curves.evaluation_losses]
    shown = training[int(len(training) * _FALL) :] + held_out
    margin = 0.04 * (max(shown) - min(shown))
    values = Axis(low=min(shown) - margin, high=max(shown) + margin, dots=4 * _LOSS_ROWS)
    canvas = Canvas(columns, _LOSS_ROWS)
    line = [(steps.dot(s), values.dot(y)) for s, y in zip(curves.steps, training, strict=True)]
    canvas.line(line, _TRAINING)
    if line[0][1] >= values.dots:  # it began above what is shown
        canvas.mark(line[0][0], values.dots - 1, "↑", _TRAINING)
    evaluations = list(zip(curves.evaluation_steps, held_out, strict=True))
    evaluations.sort(key=lambda point: point[0] == curves.best_step)  # drawn last, it stays seen
    for step, value in evaluations:
        best = step == curves.best_step
        mark, style = ("●", _BEST) if best else ("○", _HELD_OUT)
        canvas.mark(steps.dot(step), values.dot(value), mark, style)
    ticks = values.ticks(6)
    digits = _digits(ticks)
    return _labelled(canvas, {values.dot(tick) // 4: f"{tick:.{digits}f}" for tick in ticks})


def _rate(curves: TrainingCurves, steps: Axis, columns: int) -> list[Text]:
    highest = max(curves.learning_rates)
    values = Axis(low=0.0, high=highest, dots=4 * _RATE_ROWS)
    canvas = Canvas(columns, _RATE_ROWS)
    points = zip(curves.steps, curves.learning_rates, strict=True)
    canvas.line([(steps.dot(step), values.dot(rate)) for step, rate in points], _RATE)
    return _labelled(canvas, {1: f"{highest:.2g}", 0: "rate 0"})


def _step_labels(curves: TrainingCurves, steps: Axis, columns: int) -> list[Text]:
    """Where the round steps are, and the minutes at which each was taken."""
    ticks = [int(tick) for tick in steps.ticks(max(2, columns // 12)) if tick == int(tick)]
    columns_of = [steps.dot(tick) // 2 for tick in ticks]
    minutes = [f"{_minutes(curves, tick):.1f}" for tick in ticks]
    numbers = [f"{tick:,}" for tick in ticks]
    return [
        _spread("step", columns_of, numbers, columns),
        _spread("minutes", columns_of, minutes, columns),
    ]


def _minutes(curves: TrainingCurves, step: int) -> float:
    i = bisect.bisect_left(curves.steps, step)
    return curves.seconds[i] / 60 if step > 0 else 0.0


def _spread(name: str, places: Sequence[int], labels: Sequence[str], columns: int) -> Text:
    """Labels, each centred on its column, but all of it within the columns."""
    row = ""
    for place, label in zip(places, labels, strict=True):
        start = min(max(0, place - len(label) // 2), columns - len(label))
        row = row.ljust(start) + label
    return Text(f"{name:>{_MARGIN - 2}}  {row}", no_wrap=True)


def _labelled(canvas: Canvas, labels: dict[int, str]) -> list[Text]:
    """The canvas behind an axis, with a label at each of these rows, counted from below."""
    lines = []
    for i, dots in enumerate(canvas.lines()):
        label = labels.get(canvas.rows - 1 - i)
        head = f"{label or '':>{_MARGIN - 2}} {'┤' if label else '│'}"
        lines.append(Text(no_wrap=True).append(head, _FAINT).append_text(dots))
        lines[-1].rstrip()
    return lines


def _digits(ticks: Sequence[float]) -> int:
    """Decimals that tell neighbouring ticks apart."""
    apart = ticks[1] - ticks[0] if len(ticks) > 1 else 0.01
    return next((n for n in range(6) if round(apart, n) == round(apart, 8)), 6)
