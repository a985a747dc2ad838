"""Forecast of the validation loss that a finished run would reach with more steps.

At a constant learning rate, the loss falls along a + b D^(-1/4). D are the tokens trained on; those
of repeated epochs count less (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models",
equation 5). The decay lowers the loss further, by about as much in a longer run. A resumed run that
gets more steps returns to the constant learning rate and decays at its new end, so that its gain is
b times the difference of D^(-1/4). `_GAIN` and `_ERROR` are from the runs in docs/learning.md.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tgen.errors import TgenError
from tgen.reports.training import EvalReport, Forecast
from tgen.runs import log as run_log
from tgen.runs.curves import numbers
from tgen.runs.run_record import RunRecord
from tgen.training.state import Progress

_EXPONENT = 0.25
_EPOCHS = 15.4  # R*: after so many epochs more, a token counts 1/e as much as a new one
_GAIN = 1.125  # times the gain of the formula
_ERROR = 1.0  # times the gain: 90% of the measured runs were that close; some gained nothing
_NOISE = 0.005  # bits per byte: runs with other seeds differ as much
_MIN_EVALUATIONS = 4  # at the constant learning rate
_STEEPER = 1.5  # times the slope: if later evaluations fall faster, the curve has another form
_MIN_TIMES, _MAX_TIMES = 1.5, 2.0  # fewer steps have no constant phase, more are not measured


def forecast_run(
    out: Path,
    record: RunRecord,
    progress: Progress,
    *,
    n_tokens: int,
    best: float | None = None,
    times: float = _MAX_TIMES,
) -> Forecast | None:
    """Return the forecast for `times` the steps or minutes of a new model's finished run, which
    reached `best` bits per byte (None: see its log) on `n_tokens` of text; None if its curve allows
    none."""
    config, steps = record.plan.train, progress.step
    is_measured = record.start_from is None and record.chat is None and not record.overridden
    improves = steps == progress.total_steps == progress.best_step and not progress.stopped_early
    is_limited = config.max_steps is not None or progress.n_rollbacks > 0
    if progress.decay_start is None or not (is_measured and improves) or is_limited:
        return None
    try:
        records = run_log.read(out)
        names = ("step", "bits_per_byte")
        columns = [numbers(records, EvalReport.__name__, name) for name in names]
    except TgenError:  # the log was edited
        return None
    best = best or run_log.last_done(records).get("best_bits_per_byte")
    constant = range(config.warmup_steps + 1, progress.decay_start + 1)
    evaluations = [one for one in zip(*columns, strict=True) if one[0] in constant]
    epochs = progress.windows * record.plan.context_length / n_tokens
    gain = forecast_gain(evaluations, steps, epochs=epochs, times=times)
    if gain is None or not isinstance(best, float):
        return None
    return Forecast(
        steps=round(steps * times),
        minutes=None if config.steps else config.minutes * times,
        bits_per_byte=best - gain,
        error=max(_NOISE, _ERROR * gain),
    )


def times_as_long(old: RunRecord, new: RunRecord) -> float | None:
    """Return the length of a run relative to its first part; None if other settings changed."""
    before, after = old.plan.train, new.plan.train
    same_end = replace(after, steps=before.steps, minutes=before.minutes)
    if same_end != before or new.corpus_changes != old.corpus_changes:
        return None
    if before.steps is not None:
        return None if after.steps is None else after.steps / before.steps
    return None if after.steps is not None else after.minutes / before.minutes


def forecast_gain(
    evaluations: Sequence[tuple[float, float]], steps: int, *, epochs: float, times: float
) -> float | None:
    """Return the bits per byte that `times` the steps gain over a run of `steps` steps and `epochs`
    epochs; `evaluations` are steps and bits per byte at its constant learning rate."""
    if len(evaluations) < _MIN_EVALUATIONS or not _MIN_TIMES <= round(times, 3) <= _MAX_TIMES:
        return None
    x, bits = np.array([(_loss_term(n * epochs / steps), bits) for n, bits in evaluations]).T
    half = len(x) // 2
    slope, late_slope = (float(np.polyfit(x[i:], bits[i:], 1)[0]) for i in (0, half))
    if not 0 < late_slope <= _STEEPER * slope:  # the loss rises, or has not begun to level off
        return None
    return _GAIN * slope * (_loss_term(epochs) - _loss_term(times * epochs))


def _loss_term(epochs: float) -> float:
    """Return D^(-1/4), with D in epochs of new text that teach as much as `epochs` of one text."""
    more = max(0.0, epochs - 1)
    return math.pow(min(epochs, 1) - _EPOCHS * math.expm1(-more / _EPOCHS), -_EXPONENT)
