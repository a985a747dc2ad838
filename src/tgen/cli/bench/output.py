"""Throughput as a table or in llama-bench's formats, with comparisons, and saved to a file.

It can be compared with that of another engine or of an earlier run.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from tgen.benchmark.statistics import spread
from tgen.cli import console
from tgen.cli.bench import llama_bench
from tgen.cli.bench.options import BenchOptions
from tgen.cli.rich_console import out
from tgen.drawing.tables import table
from tgen.reports.benchmark import (
    Difference,
    Interval,
    Machine,
    PrecisionReport,
    ThroughputReport,
    TrialReport,
)
from tgen.reports.inspection import ModelSummary
from tgen.reports.json_text import json_value
from tgen.reports.number_format import MIB, count
from tgen.storage import files

if TYPE_CHECKING:
    from tgen.benchmark.sweep import Setup


_TOO_FEW = "too few trials"
_WRITERS: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {
    "md": llama_bench.to_markdown,
    "csv": llama_bench.to_csv,
    "json": llama_bench.to_json,
    "jsonl": llama_bench.to_jsonl,
}


def throughput_table(reports: Sequence[ThroughputReport]) -> Table:
    """Return one row per workload; settings that all rows share have no column."""
    settings = {
        ">engine": [r.engine for r in reports],
        ">dtype": [r.dtype for r in reports],
        ">threads": [str(r.threads) for r in reports],
        ">batch": [str(r.batch) for r in reports],
    }
    shown = {
        name: cells
        for name, cells in settings.items()
        if len(set(cells)) > 1 or (name == ">batch" and cells[0] != "1")
    }
    with_first = any(r.first_token for r in reports) and not shown  # too wide beside settings
    with_peak = any(r.peak_rate for r in reports)
    names = [">test", *shown, ">tokens/s", ">95% CI", *([">first token"] if with_first else [])]
    rows = table(*names, *([">% of peak"] if with_peak else []))
    for i, r in enumerate(reports):
        percent = f" ±{spread(r.seconds):.0%}" if len(r.seconds.seconds) > 1 else ""
        interval = f"{_rate(r.rate.low)} – {_rate(r.rate.high)}" if r.rate.is_finite else _TOO_FEW
        cells = [r.label, *(column[i] for column in shown.values())]
        cells += [f"{_rate(r.median_rate)}{percent}", interval]
        if with_first:
            cells.append("" if r.first_token is None else f"{r.first_token.median * 1e3:.1f} ms")
        if with_peak:
            percent = "" if r.peak_rate is None else f"{r.median_rate / r.peak_rate:.0%}"
            cells.append(f"{percent} {r.bound_by}")
        rows.add_row(*cells)
    return rows


def _footer_lines(
    reports: Sequence[ThroughputReport],
    setups: Sequence["Setup"],
    machine: Machine,
    peak_memory: int | None,
) -> list[Text]:
    """Return the lines below the table: definitions, machine, peak rates, memory, warnings."""
    lines = [
        "tokens/s: median ± half the range from the 10th to the 90th percentile of the trials",
        f"{setups[0].gpu or machine.cpu}, {count(machine.n_cpus, 'CPU')}",
    ]
    by_peak = {setup.peak: setup for setup in setups if setup.peak}
    for peak, setup in by_peak.items():
        name = f"{setup.dtype}, threads {setup.threads}, " if len(by_peak) > 1 else ""
        lines.append(
            f"peak, {name}memory: {peak.bytes_per_second / 1e9:.1f} GB/s (reading "
            f"{peak.read_bytes / MIB:.1f} MiB, the size of the weights); compute: "
            f"{peak.flops_per_second / 1e9:,.0f} GFLOP/s (matrix product)"
        )
    per_token = {r.cache_bytes_per_token for r in reports if r.cache_bytes_per_token is not None}
    measured = " and ".join(f"{n:,.0f}" for n in sorted(per_token)) or "unknown"
    key_bytes = sorted({setup.cost.key_bytes for setup in setups})
    computed = " and ".join(f"{n:,.10g}" for n in key_bytes)
    lines.append(f"KV cache: {measured} bytes per token (measured), {computed} (computed)")
    if peak_memory is not None:
        lines[-1] += f"; peak RSS of this process: {peak_memory / MIB:,.0f} MiB"
    warnings = []
    if machine.load is not None and machine.load > machine.n_cpus / 2:
        warnings.append(f"the load average was {machine.load:.1f} before the benchmark")
    for r in reports:
        name = f"{r.label}, {r.engine}, {r.dtype}, threads {r.threads}, batch {r.batch}"
        warnings += [f"{name}: {warning}" for warning in r.warnings]
    return [
        *(Text(line, style="dim") for line in lines),
        *(Text(f"warning: {warning}", style="yellow") for warning in warnings),
    ]


def comparison_table(differences: Sequence[Difference], *, of: str, to: str) -> Table:
    """Return one row per workload: the speed of `of` relative to `to`, and the noise."""
    with_probe = any(d.probe_ratio is not None for d in differences)
    names = [">test", f">{of} / {to}", ">99% CI", ">noise"]
    rows = table(*names, *([">machine"] if with_probe else []), "")
    for d in differences:
        noise = ""
        if d.noise is not None:
            width = max(d.noise.high - 1, 1 - d.noise.low)
            noise = f"±{width:.1%}" if d.noise.is_finite else "±?"
        probe = [_range(d.probe_ratio) if d.probe_ratio else ""] if with_probe else []
        verdict = d.verdict or "not significant"
        rows.add_row(d.label, f"{d.ratio.estimate:.3f}", _range(d.ratio), noise, *probe, verdict)
    return rows


def comparison_caption(differences: Sequence[Difference]) -> str:
    """Return a line that defines the columns."""
    caption = "noise: ratio of tgen to itself"
    if any(d.probe_ratio is not None for d in differences):
        caption += (
            "; machine: 99% CI of the speed probe, now / then; a significant change exceeds the "
            "square of its limit"
        )
    return caption


def precision_line(report: PrecisionReport) -> str:
    """Return the cost of storing the weights in fewer bits."""
    cost = report.bits_per_byte - report.reference_bits_per_byte
    return (
        f"{report.dtype} weights: {report.bits_per_byte:.4f} bits per byte, "
        f"{report.reference_dtype}: {report.reference_bits_per_byte:.4f} ({cost:+.4f}), on "
        f"{report.tokens:,} tokens sampled with {report.reference_dtype} weights "
        f"(largest logit difference {report.max_logit_difference:.1e})"
    )


def _range(interval: Interval) -> str:
    return f"{interval.low:.3f} – {interval.high:.3f}" if interval.is_finite else _TOO_FEW


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


@dataclass(frozen=True, kw_only=True)
class BenchContext:
    """The model, and the machine as it was before the measurements."""

    summary: ModelSummary
    machine: Machine

    def identity(self, setup: "Setup") -> dict[str, Any]:
        """Return the fields that must be equal for a comparison with an earlier run."""
        return {
            "cpu_info": self.machine.cpu,
            "n_cpus": self.machine.n_cpus,
            "gpu_info": setup.gpu,
            "family": self.summary.family,
            "model_n_params": self.summary.n_parameters,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Results of `--against` or `--compare`, one per workload."""

    differences: Sequence[Difference]
    of: str  # name of the measured engine or run
    to: str  # name of the reference
    others: Sequence[ThroughputReport] = ()  # the other engine's, one per report of tgen's
    fields: Mapping[str, Any] = field(default_factory=dict)  # for JSON
    remark: str = ""


def collect_context(options: BenchOptions) -> BenchContext:
    """Read the model and the machine; call it before measuring, which raises the load average."""
    from tgen.inspection.model_summary import summarize
    from tgen.lora.model_with_adapter import load
    from tgen.machine.description import describe_machine

    return BenchContext(summary=summarize(load(options.path)), machine=describe_machine())


def write_report(
    options: BenchOptions,
    context: BenchContext,
    results: Sequence[tuple["Setup", ThroughputReport]],
    *,
    comparison: Comparison | None = None,
    precision: Mapping[str, PrecisionReport | None] | None = None,
) -> None:
    """Write the results in the requested format, and to `--save`.

    `precision` is the cost of each dtype with fewer bits than the stored weights.
    """
    from tgen.machine.memory import peak_memory_bytes

    peak_memory = peak_memory_bytes()
    precision = precision or {}
    records = [
        llama_bench.format_record(
            report,
            context.summary,
            context.machine,
            gpu=setup.gpu,
            cache_dtype=setup.cache_dtype,
            peak=setup.peak,
            seed=options.seed,
            peak_memory=peak_memory,
        )
        | {"precision": json_value(precision.get(report.dtype))}
        for setup, report in results
    ]
    try:
        if options.output == "table":
            lines = _format_tables(context, results, comparison, peak_memory)
            lines += [precision_line(report) for report in precision.values() if report]
            console.show(*lines, wrap=out.is_terminal)
        elif options.output == "json" and comparison:
            record = {"schema": "tgen.bench.difference/2", "rows": records, **comparison.fields}
            record |= {"others": comparison.others, "differences": comparison.differences}
            console.write(json.dumps(json_value(record), allow_nan=False).encode() + b"\n")
        else:
            console.write(_WRITERS[options.output](records).encode())
            for _, report in results if options.output in ("md", "csv") else ():
                for warning in report.warnings:
                    line = f"warning: {report.label}: {warning}"
                    console.print_status(line)
    finally:  # also after a closed pipe: the results are expensive
        if options.save:
            files.write_output(options.save, llama_bench.to_json(records).encode())
            console.print_status(f"wrote {options.save}")


def _format_tables(
    context: BenchContext,
    results: Sequence[tuple["Setup", ThroughputReport]],
    comparison: Comparison | None,
    peak_memory: int | None,
) -> list[Any]:
    reports = [report for _, report in results]
    compared: list[Any] = []
    if comparison:
        differences = comparison.differences
        captions = [comparison_caption(differences), comparison.remark]
        compared = [
            "",
            comparison_table(differences, of=comparison.of, to=comparison.to),
            *(Text(line, style="dim") for line in captions if line),
            "",
        ]
        if comparison.others:
            pairs = zip(reports, comparison.others, strict=True)
            reports = [report for pair in pairs for report in pair]
    setups = [setup for setup, _ in results]
    footer = _footer_lines(reports, setups, context.machine, peak_memory)
    return [throughput_table(reports), *compared, *footer]


def show_last_report(
    options: BenchOptions, schema: str, reports: Iterable[Any], table: Callable[[Any], list[Any]]
) -> None:
    """Show progress for the trials, then write the report that follows them."""
    with console.progress("measuring") as update:
        for report in reports:
            if isinstance(report, TrialReport):
                update(report.trial / report.trials)
    if options.output == "json":
        write_json(options, schema, json_value(report))
    else:
        console.show(*table(report), wrap=out.is_terminal)


def write_json(options: BenchOptions, schema: str, fields: dict[str, Any]) -> None:
    """Write one JSON object to stdout."""
    record = {"schema": schema, "model": str(options.path), "trials": options.trials} | fields
    console.write(json.dumps(json_value(record), allow_nan=False).encode() + b"\n")
