"""Throughput as a table or in llama-bench's formats, with comparisons, and saved to a file."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.text import Text

from tgen.cli import console
from tgen.cli.bench import llama_bench
from tgen.cli.bench.options import BenchOptions
from tgen.cli.bench.throughput_table import (
    comparison_caption,
    comparison_table,
    footer_lines,
    precision_line,
    throughput_table,
)
from tgen.cli.rich_console import out
from tgen.reports.benchmark import (
    Difference,
    Machine,
    PrecisionReport,
    ThroughputReport,
    TrialReport,
)
from tgen.reports.inspection import ModelSummary
from tgen.reports.to_json import json_value
from tgen.storage import files

if TYPE_CHECKING:
    from tgen.benchmark.sweep import Setup

_WRITERS: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {
    "md": llama_bench.to_markdown,
    "csv": llama_bench.to_csv,
    "json": llama_bench.to_json,
    "jsonl": llama_bench.to_jsonl,
}


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
    from tgen.benchmark.machine import describe_machine
    from tgen.inspection.model_summary import summarize
    from tgen.lora.merging import load

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
    from tgen.benchmark.machine import peak_memory_bytes

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
                    console.print_status(line, quiet=options.quiet)
    finally:  # also after a closed pipe: the results are expensive
        if options.save:
            files.write_output(options.save, llama_bench.to_json(records).encode())
            console.print_status(f"wrote {options.save}", quiet=options.quiet)


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
    setups = {setup.peak: setup for setup, _ in results if setup.peak}
    peaks = [
        (f"{setup.dtype}, threads {setup.threads}, " if len(setups) > 1 else "", peak)
        for peak, setup in setups.items()
    ]
    first = results[0][0]
    footer = footer_lines(
        reports,
        peaks,
        context.machine,
        first.gpu or context.machine.cpu,
        computed_cache_bytes=sorted({setup.cost.key_bytes for setup, _ in results}),
        peak_memory=peak_memory,
    )
    return [throughput_table(reports), *compared, *footer]


def show_last_report(
    options: BenchOptions, schema: str, reports: Iterable[Any], table: Callable[[Any], list[Any]]
) -> None:
    """Show progress for the trials, then write the report that follows them."""
    with console.progress("measuring", quiet=options.quiet) as update:
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
