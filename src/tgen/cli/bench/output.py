"""How `tgen bench` shows throughput: a table, llama-bench's formats, a file to compare with."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from tgen.cli import console
from tgen.cli.bench import llama_bench
from tgen.cli.bench.options import BenchOptions
from tgen.cli.bench.tables.kv_cache import precision_line
from tgen.cli.bench.tables.throughput import difference_caption, footer_lines, throughput_table
from tgen.reports import (
    Difference,
    Machine,
    ModelSummary,
    PrecisionReport,
    ThroughputReport,
    json_value,
)
from tgen.storage import files

if TYPE_CHECKING:
    from tgen.benchmark.sweep import Setup

_WRITERS: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {
    "md": llama_bench.as_markdown,
    "csv": llama_bench.as_csv,
    "json": llama_bench.as_json,
    "jsonl": llama_bench.as_jsonl,
}

_NO_COSTS: Mapping[str, PrecisionReport | None] = {}


@dataclass(frozen=True, kw_only=True)
class BenchContext:
    """The model, and the machine as it was before anything was measured."""

    summary: ModelSummary
    machine: Machine

    def of(self, setup: "Setup") -> dict[str, Any]:
        """What a row says of both."""
        from tgen.benchmark.sweep import gpu_of

        return llama_bench.facts(self.summary, self.machine, setup.stored, gpu_of(setup))


@dataclass(frozen=True)
class Comparison:
    """What stands beside throughput that is compared."""

    differences: Sequence[Difference]
    table: Table
    theirs: Sequence[ThroughputReport] = ()  # of a peer, a report for each of ours
    more: Mapping[str, Any] = field(default_factory=dict)  # for JSON
    remark: str = ""


def collect_context(asked: BenchOptions) -> BenchContext:
    """Call it before measuring: afterwards the machine's load is the benchmark's own."""
    from tgen.benchmark.machine import describe_machine
    from tgen.checkpoint.model_dir import load
    from tgen.inspection.model_summary import summarize

    return BenchContext(summary=summarize(load(asked.path)), machine=describe_machine())


def show(
    asked: BenchOptions,
    known: BenchContext,
    found: Sequence[tuple["Setup", ThroughputReport]],
    compared: Comparison | None = None,
    costs: Mapping[str, PrecisionReport | None] = _NO_COSTS,
) -> None:
    """In the form that was asked for, and kept if a file was named. `costs`: of weights that are
    held in fewer bits than they are stored in."""
    from tgen.benchmark.memory import peak_memory_bytes

    peak = peak_memory_bytes()
    rows = [
        llama_bench.row(
            report,
            known.summary,
            known.machine,
            facts=known.of(setup),
            limits=setup.limits,
            seed=asked.seed,
            peak_memory=peak,
        )
        | {"precision": json_value(costs.get(report.stored))}
        for setup, report in found
    ]
    try:
        if asked.output == "table":
            things = _tables(known, found, compared, peak)
            things += [precision_line(cost) for cost in costs.values() if cost]
            console.show(*things, wrap=console.out.is_terminal)
        elif asked.output == "json" and compared:
            record = {"schema": "tgen.bench.difference/1", "rows": rows, **compared.more}
            record |= {"theirs": compared.theirs, "differences": compared.differences}
            console.write(json.dumps(json_value(record), allow_nan=False).encode() + b"\n")
        else:
            console.write(_WRITERS[asked.output](rows).encode())
            for report in (report for _, report in found if asked.output in ("md", "csv")):
                for doubt in report.doubts:
                    console.print_status(f"doubt: {report.label}: {doubt}", quiet=asked.quiet)
    finally:  # a reader that has gone is no reason to lose the figures
        if asked.save:
            files.put(asked.save, llama_bench.as_json(rows).encode())
            console.print_status(f"wrote {asked.save}", quiet=asked.quiet)


def _captions(compared: Comparison) -> list[Text]:
    lines = [difference_caption(compared.differences), compared.remark]
    return [Text(line, style="dim") for line in lines if line]


def _tables(
    known: BenchContext,
    found: Sequence[tuple["Setup", ThroughputReport]],
    compared: Comparison | None,
    peak: int | None,
) -> list[Any]:
    reports = [report for _, report in found]
    if compared and compared.theirs:
        pairs = zip(reports, compared.theirs, strict=True)
        reports = [report for pair in pairs for report in pair]
    limits = {setup.limits: setup for setup, _ in found if setup.limits}
    named = [
        (f"{setup.stored}, {setup.threads} threads: " if len(limits) > 1 else "", of)
        for of, setup in limits.items()
    ]
    formula = found[0][0].work.key_bytes
    machine = known.of(found[0][0])["gpu_info"] or known.machine.cpu
    return [
        throughput_table(reports),
        *(["", compared.table, *_captions(compared), ""] if compared else []),
        *footer_lines(
            reports, named, known.machine, machine, cache_formula=formula, peak_memory=peak
        ),
    ]
