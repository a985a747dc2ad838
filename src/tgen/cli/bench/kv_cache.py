"""`tgen bench --kv-cache`: run it, and draw its tables and plot."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tgen.benchmark.statistics import spread
from tgen.cli import console
from tgen.cli.bench.options import BenchOptions
from tgen.cli.bench.output import write_json
from tgen.cli.rich_console import out
from tgen.drawing.braille_plot import Axis, Canvas
from tgen.drawing.tables import table
from tgen.errors import UsageError
from tgen.reports.benchmark import CacheVerdict, LengthReport, LinearFit, Timing, TrialReport
from tgen.reports.number_format import count

_COLUMNS, _ROWS = 60, 12  # plot size in characters
_MARGIN = 9
_MIN_LENGTHS = 3  # for a line fit
_STYLES = {"cached": "green", "uncached": "red"}


def run_kv_cache(options: BenchOptions) -> None:
    """Time the last token of texts of each length, with and without the KV cache."""
    from tgen.benchmark.kv_cache import (
        VERDICT_TOKENS,
        default_lengths,
        fit_line,
        measure_lengths,
        sample_text,
        verify_cache,
    )
    from tgen.loaded_model import open_model

    model = open_model(options.path, options.engine_options)
    engine = model.engine
    if engine.context_length < 2:
        raise UsageError(
            f"--kv-cache: the model's context must be at least 2 tokens "
            f"(got {engine.context_length})",
            "use another model",
        )
    lengths = sorted(set(options.lengths or default_lengths(engine.context_length)))
    n_tokens = min(max(lengths), engine.context_length)
    text = sample_text(engine, model.encode(b""), n_tokens, seed=options.seed)
    reports: list[LengthReport] = []
    with console.progress("measuring") as update:
        for report in measure_lengths(engine, text, lengths, trials=options.trials):
            if isinstance(report, TrialReport):
                update(report.trial / report.trials)
            else:
                reports.append(report)
        verdict = verify_cache(engine, text[: max(1, n_tokens // 4)], VERDICT_TOKENS)
    cached = fit_line(lengths, [report.cached for report in reports])
    uncached = fit_line(lengths, [report.uncached for report in reports])
    computed = model.bundle.config.cache_bytes_per_token(engine.cache_dtype)
    if options.output == "json":
        fields = {
            "seed": options.seed,
            "cache_bytes_per_token": computed,
            "lengths": reports,
            "growth": {"cached": cached, "uncached": uncached},
            "verdict": verdict,
        }
        write_json(options, "tgen.bench/3", fields)
        return
    console.show(
        f"last token of each text: median ± half the 10th-to-90th percentile range of "
        f"{count(options.trials, 'interleaved trial')}",
        length_table(reports),
        *length_plot(reports),
        *fit_lines(reports, cached, uncached),
        cache_line(reports, computed),
        verdict_line(verdict),
        wrap=out.is_terminal,
    )


def length_table(reports: Sequence[LengthReport]) -> Table:
    """Return one row per length: medians, ± half the 10th-to-90th percentile range."""
    names = ["length", "prefill tokens/s", "cached ms", "uncached ms", "speedup", "95% CI"]
    rows = table(*(f">{name}" for name in [*names, "cache KiB"]))
    for report in reports:
        ratio = report.speedup
        rows.add_row(
            f"{report.length:,}",
            f"{(report.length - 1) / report.prefill.median:,.0f}",
            _ms(report.cached),
            _ms(report.uncached),
            f"{ratio.estimate:.1f}x",
            f"{ratio.low:.1f} – {ratio.high:.1f}" if ratio.is_finite else "too few trials",
            f"{report.cache_bytes / 1024:,.1f}",
        )
    return rows


def length_plot(reports: Sequence[LengthReport]) -> list[Text]:
    """Return a log-log plot of the time per token by text length; a constant cost is level."""
    if len(reports) < 2:
        return []
    logs = {name: [math.log10(getattr(r, name).median) for r in reports] for name in _STYLES}
    values = [*logs["cached"], *logs["uncached"]]
    y = Axis(low=math.floor(min(values)), high=math.ceil(max(values)), dots=4 * _ROWS)
    log_lengths = [math.log2(r.length) for r in reports]
    x = Axis(low=log_lengths[0], high=log_lengths[-1], dots=2 * _COLUMNS)
    canvas = Canvas(_COLUMNS, _ROWS)
    for name, style in _STYLES.items():
        points = [(x.dot(a), y.dot(b)) for a, b in zip(log_lengths, logs[name], strict=True)]
        canvas.line(points, style)
        canvas.mark(*points[-1], name[0].upper(), style)
    decades = {y.dot(n) // 4: n for n in range(int(y.low), int(y.high) + 1)}
    lines = []
    for i, line in enumerate(canvas.lines()):
        decade = decades.get(_ROWS - 1 - i)
        label = "" if decade is None else f"{10.0 ** (decade + 3):g} ms"
        lines.append(Text(f"{label:>{_MARGIN - 1}} ").append_text(line))
    ticks = ""
    for report, log_length in zip(reports, log_lengths, strict=True):
        label = str(report.length)
        column = _MARGIN + x.dot(log_length) // 2
        start = max(min(column, _MARGIN + _COLUMNS - len(label)), 0)
        if start >= len(ticks) + (1 if ticks else 0):
            ticks = ticks.ljust(start) + label
    legend = "time per token by text length (log-log): C cached, U uncached"
    return [*lines, Text(ticks), Text(legend, style="dim")]


def fit_lines(reports: Sequence[LengthReport], cached: LinearFit, uncached: LinearFit) -> list[str]:
    """Return the linear fits and the speedup that they predict; [] for fewer than 3 lengths."""
    if len(reports) < _MIN_LENGTHS:
        return []
    lines = [
        f"{name}: {fit.intercept * 1e3:.3f} ms + {fit.slope * 1e6:.3f} µs per token of text "
        f"(largest deviation {fit.max_deviation:.0%})"
        for name, fit in [("cached", cached), ("uncached", uncached)]
    ]
    last = reports[-1]
    predicted = uncached.at(last.length) / cached.at(last.length)
    ratios = f"predicted {predicted:.1f}x, measured {last.speedup.estimate:.1f}x"
    return [*lines, f"speedup at {last.length:,} tokens: {ratios}"]


def cache_line(reports: Sequence[LengthReport], computed: int) -> str:
    """Return the measured and the computed bytes per token."""
    measured = {report.cache_bytes / report.length for report in reports}
    numbers = " and ".join(f"{n:,.10g}" for n in sorted(measured))
    return (
        f"KV cache: {numbers} bytes per token (measured), {computed:,} (computed: 2 x layers x KV "
        "heads x head_dim x bytes per number)"
    )


def verdict_line(verdict: CacheVerdict) -> str:
    """Return whether the cache changed the text."""
    texts = f"{count(verdict.tokens, 'greedy token')}, prompt tokens: {verdict.prompt_tokens}"
    difference = f"(largest logit difference {verdict.max_logit_difference:.1e})"
    if verdict.identical:
        return f"verdict: identical with and without the cache: {texts} {difference}"
    return (
        f"verdict: different from token {verdict.first_difference} on: {texts}; gap between the "
        f"top two logits there: {verdict.logit_gap:.1e} {difference}"
    )


def _ms(timing: Timing) -> str:
    return f"{timing.median * 1e3:.2f} ±{spread(timing):.0%}"
