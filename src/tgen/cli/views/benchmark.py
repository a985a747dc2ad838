"""The cache benchmark as a table and a verdict."""

from collections.abc import Sequence

from rich.table import Table

from tgen.reports import LengthReport, PrecisionReport, Timing, Verdict


def length_table(reports: Sequence[LengthReport]) -> Table:
    """A row a length: medians, with half the way from the 10th to the 90th percentile."""
    with_uncached = any(report.uncached for report in reports)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("length", "prefill tokens/s", "cached ms"):
        table.add_column(name, justify="right")
    for name in ("uncached ms", "speed-up") if with_uncached else ():
        table.add_column(name, justify="right")
    table.add_column("cache KiB", justify="right")
    for report in reports:
        row = [
            str(report.length),
            f"{report.length / report.prefill.median:,.0f}",
            _ms(report.cached),
        ]
        if report.uncached is not None and report.speedup is not None:
            row += [_ms(report.uncached), f"{report.speedup:.1f}x"]
        table.add_row(*row, f"{report.cache_bytes / 1024:,.1f}")
    return table


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
    spread = (timing.high - timing.low) / 2 / timing.median
    return f"{timing.median * 1e3:.2f} ±{spread:.0%}"
