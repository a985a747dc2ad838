"""The cache benchmark as a table, a picture, and what it proves."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tgen.cli.render.braille_plot import Axis, Canvas
from tgen.cli.render.tables import table
from tgen.reports import Growth, LengthReport, PrecisionReport, Timing, Verdict

_COLUMNS, _ROWS = 60, 12  # of the picture
_MARGIN = 9
_FEWEST = 3  # lengths that a line can be told from
_STYLES = {"cached": "green", "uncached": "red"}


def length_table(reports: Sequence[LengthReport]) -> Table:
    """A row a length: medians, with half the way from the 10th to the 90th percentile."""
    names = ["length", "prefill tokens/s", "cached ms", "uncached ms", "speed-up", "95 % sure of"]
    rows = table(*(f">{name}" for name in [*names, "cache KiB"]))
    for report in reports:
        found = report.speedup
        rows.add_row(
            f"{report.length:,}",
            f"{(report.length - 1) / report.prefill.median:,.0f}",
            _ms(report.cached),
            _ms(report.uncached),
            f"{found.middle:.1f}x",
            f"{found.low:.1f} – {found.high:.1f}" if found.is_known else "too few trials",
            f"{report.cache_bytes / 1024:,.1f}",
        )
    return rows


def curve(reports: Sequence[LengthReport]) -> list[Text]:
    """Time of a token by length, both by their logarithms: a cost that is the same at any length is
    level, one that grows with it rises by the same at each doubling."""
    if len(reports) < 2:
        return []
    arms = {
        "cached": [r.cached.median for r in reports],
        "uncached": [r.uncached.median for r in reports],
    }
    all_of = [math.log10(t) for times in arms.values() for t in times]
    up = Axis(low=math.floor(min(all_of)), high=math.ceil(max(all_of)), dots=4 * _ROWS)
    logs = [math.log2(r.length) for r in reports]
    across = Axis(low=logs[0], high=logs[-1], dots=2 * _COLUMNS)
    canvas = Canvas(_COLUMNS, _ROWS)
    for name, times in arms.items():
        points = [(across.dot(x), up.dot(math.log10(t))) for x, t in zip(logs, times, strict=True)]
        canvas.line(points, _STYLES[name])
        canvas.mark(*points[-1], name[0].upper(), _STYLES[name])
    decades = {up.dot(n) // 4: n for n in range(int(up.low), int(up.high) + 1)}
    lines = []
    for i, line in enumerate(canvas.lines()):
        decade = decades.get(_ROWS - 1 - i)
        name = "" if decade is None else f"{10.0 ** (decade + 3):g} ms"
        lines.append(Text(f"{name:>{_MARGIN - 1}} ").append_text(line))
    ticks = ""
    for report, x in zip(reports, logs, strict=True):
        at = _MARGIN + across.dot(x) // 2
        label = str(report.length)
        start = max(min(at, _MARGIN + _COLUMNS - len(label)), 0)
        if start >= len(ticks) + (1 if ticks else 0):
            ticks = ticks.ljust(start) + label
    legend = "C with the cache, U without: a token by the text's length, both logarithmic"
    return [*lines, Text(ticks), Text(legend, style="dim")]


def growth_lines(reports: Sequence[LengthReport], cached: Growth, uncached: Growth) -> list[str]:
    """Each arm's line, and whether they explain the speed-up; of two lengths there is none."""
    if len(reports) < _FEWEST:
        return []
    arms = [("with the cache", cached), ("without", uncached)]
    lines = [
        f"{name}: {g.flat * 1e3:.3f} ms + {g.per_token * 1e6:.3f} µs for each token of the text "
        f"(at most {g.deviation:.0%} off the line)"
        for name, g in arms
    ]
    last = reports[-1]
    explained = uncached.at(last.length) / cached.at(last.length)
    said = f"the lines explain {explained:.1f}x, measured {last.speedup.middle:.1f}x"
    return [*lines, f"at {last.length:,} {said}"]


def cache_line(reports: Sequence[LengthReport], formula: int) -> str:
    """Bytes a token, measured beside the formula."""
    measured = {report.cache_bytes / report.length for report in reports}
    numbers = " and ".join(f"{n:,.10g}" for n in sorted(measured))
    same = "the same" if measured == {formula} else f"{formula:,}"
    return (
        f"cache: {numbers} bytes a token; 2 x layers x KV heads x head_dim x bytes of a number is "
        f"{same}"
    )


def verdict_line(verdict: Verdict) -> str:
    """Whether the cache changed the text."""
    texts = f"{verdict.tokens} greedy tokens after a prompt of {verdict.prompt_tokens}"
    if verdict.identical:
        return (
            f"verdict: identical, with and without the cache, over {texts} "
            f"(largest logit difference {verdict.max_logit_difference:.1e})"
        )
    return (
        f"verdict: the texts differ from token {verdict.first_difference} of {texts}; the two "
        f"best logits are {verdict.gap:.1e} apart there "
        f"(largest logit difference {verdict.max_logit_difference:.1e})"
    )


def precision_line(report: PrecisionReport) -> str:
    """What weights in fewer bits cost."""
    cost = report.bits_per_byte - report.exact_bits_per_byte
    return (
        f"{report.stored} weights: {report.bits_per_byte:.4f} bits per byte where {report.exact} "
        f"ones have {report.exact_bits_per_byte:.4f} ({cost:+.4f}), over {report.tokens:,} tokens "
        f"written with {report.exact} ones "
        f"(largest logit difference {report.max_logit_difference:.1e})"
    )


def _ms(timing: Timing) -> str:
    return f"{timing.median * 1e3:.2f} ±{timing.spread:.0%}"
