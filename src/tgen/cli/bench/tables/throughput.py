"""What tests of throughput found, as tables and lines."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tgen.cli.render.tables import table
from tgen.reports import Difference, Interval, Limits, Machine, ThroughputReport


def throughput_table(reports: Sequence[ThroughputReport]) -> Table:
    """A row a test: medians, with half the way from the 10th to the 90th percentile of the trials.

    What all have in common has no column.
    """
    swept = {
        ">engine": [r.engine for r in reports],
        ">weights": [r.stored for r in reports],
        ">threads": [str(r.threads) for r in reports],
        ">rows": [str(r.batch) for r in reports],
    }
    shown = {
        name: cells
        for name, cells in swept.items()
        if len(set(cells)) > 1 or (name == ">rows" and cells[0] != "1")
    }
    limited, prompted = any(r.limit for r in reports), any(r.first_token for r in reports)
    first = prompted and not shown  # where much is swept, there is no room
    names = [">test", *shown, ">tokens/s", ">95 % sure of", *([">first token"] if first else [])]
    rows = table(*names, *([">of the limit"] if limited else []))
    for i, r in enumerate(reports):
        spread = f" ±{r.seconds.spread:.0%}" if len(r.seconds.seconds) > 1 else ""
        cells = [r.label, *(column[i] for column in shown.values())]
        cells += [f"{_rate(r.median_rate)}{spread}", _span(r.rate)]
        if first:
            cells.append("" if r.first_token is None else f"{r.first_token.median * 1e3:.1f} ms")
        if limited:
            share = "" if r.limit is None else f"{r.median_rate / r.limit:.0%}"
            cells.append(f"{share} {_BOUND[r.bound_by]}")
        rows.add_row(*cells)
    return rows


def footer_lines(
    reports: Sequence[ThroughputReport],
    limits: Sequence[tuple[str, Limits]],
    machine: Machine,
    name: str,
    *,
    cache_formula: float,
    peak_memory: int | None,
) -> list[Text]:
    """Lines below the table: the machine by its name and its limits, memory, what to doubt."""
    lines = [
        "tokens/s: the median, ± half of what lies from the 10th to the 90th percentile of the "
        "trials; 95 % sure of: where the middle lies",
        f"{name}, {machine.processors} processors",
    ]
    for setup, found in limits:
        lines.append(
            f"limit, {setup}as many bytes as the weights ({found.read_bytes / 2**20:.1f} MiB) are "
            f"read at {found.bytes_per_second / 1e9:.1f} GB/s, matrices multiplied at "
            f"{found.flops / 1e9:,.0f} GFLOP/s"
        )
    held = {r.cache_bytes_per_token for r in reports if r.cache_bytes_per_token is not None}
    measured = " and ".join(f"{n:,.0f}" for n in sorted(held)) or "not measured"
    lines.append(f"cache: {measured} bytes a token, {cache_formula:,.10g} by the formula")
    if peak_memory is not None:
        lines[-1] += f" · {peak_memory / 2**20:,.0f} MiB of memory at most, all of this process"
    said = [Text(line, style="dim") for line in lines]
    if machine.load is not None and machine.load > machine.processors / 2:
        busy = f"{machine.load:.1f} processes wanted a processor in the minute before"
        said.append(Text(f"doubt: {busy}", style="yellow"))
    for r in reports:
        where = f"{r.label}, {r.engine}, {r.stored}, {r.threads} threads, {r.batch} rows"
        said += [Text(f"doubt: {where}: {doubt}", style="yellow") for doubt in r.doubts]
    return said


def difference_table(differences: Sequence[Difference], *, of: str, to: str) -> Table:
    """A row a test: how many times as fast `of` is as `to`, beside the noise."""
    with_machine = any(d.machine is not None for d in differences)
    names = [">test", f">{of} / {to}", ">99 % sure of", ">noise"]
    rows = table(*names, *([">the machine"] if with_machine else []), "")
    for d in differences:
        noise = "" if d.noise is None else f"±{_width(d.noise)}"
        machine = [_ends(d.machine) if d.machine else ""] if with_machine else []
        verdict = d.verdict or "not sure"
        rows.add_row(d.label, f"{d.ratio.middle:.3f}", _ends(d.ratio), noise, *machine, verdict)
    return rows


def difference_caption(differences: Sequence[Difference]) -> str:
    """What the columns mean."""
    said = "noise: ours against itself"
    if any(d.machine is not None for d in differences):
        said += "; the machine: a yardstick's ratio, whose square a change must go beyond"
    return said


_BOUND = {"memory": "memory", "arithmetic": "sums", "": ""}


def _span(interval: Interval) -> str:
    if not interval.is_known:
        return "too few trials"
    return f"{_rate(interval.low)} – {_rate(interval.high)}"


def _ends(interval: Interval) -> str:
    if not interval.is_known:
        return "too few trials"
    return f"{interval.low:.3f} – {interval.high:.3f}"


def _width(noise: Interval) -> str:
    if not noise.is_known:
        return "?"
    return f"{max(noise.high - 1, 1 - noise.low):.1%}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
