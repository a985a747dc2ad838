"""How `tgen bench` shows throughput: a table, llama-bench's formats, a file to compare with."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from tgen import files
from tgen.cli import console
from tgen.cli.asked import Asked
from tgen.cli.views import llama_bench
from tgen.cli.views.benchmark import precision_line
from tgen.cli.views.throughput import difference_caption, said_of, throughput_table
from tgen.reports import (
    Difference,
    Machine,
    ModelSummary,
    PrecisionReport,
    ThroughputReport,
    json_value,
)

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
class Known:
    """The model, and the machine as it was before anything was measured."""

    summary: ModelSummary
    machine: Machine

    def of(self, setup: "Setup") -> dict[str, Any]:
        """What a row says of both."""
        from tgen.benchmark.sweep import gpu_of

        return llama_bench.facts(self.summary, self.machine, setup.stored, gpu_of(setup))


@dataclass(frozen=True)
class Compared:
    """What stands beside throughput that is compared."""

    differences: Sequence[Difference]
    table: Table
    theirs: Sequence[ThroughputReport] = ()  # of a peer, a report for each of ours
    more: Mapping[str, Any] = field(default_factory=dict)  # for JSON
    remark: str = ""


def know(asked: Asked) -> Known:
    """Call it before measuring: afterwards the machine's load is the benchmark's own."""
    from tgen.benchmark.machine import describe_machine
    from tgen.checkpoint.directory import load
    from tgen.introspect.summary import summarise

    return Known(summary=summarise(load(asked.path)), machine=describe_machine())


def show(
    asked: Asked,
    known: Known,
    found: Sequence[tuple["Setup", ThroughputReport]],
    compared: Compared | None = None,
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
                    console.note(f"doubt: {report.label}: {doubt}", quiet=asked.quiet)
    finally:  # a reader that has gone is no reason to lose the figures
        if asked.save:
            files.put(asked.save, llama_bench.as_json(rows).encode())
            console.note(f"wrote {asked.save}", quiet=asked.quiet)


def _captions(compared: Compared) -> list[Text]:
    lines = [difference_caption(compared.differences), compared.remark]
    return [Text(line, style="dim") for line in lines if line]


def _tables(
    known: Known,
    found: Sequence[tuple["Setup", ThroughputReport]],
    compared: Compared | None,
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
        *said_of(reports, named, known.machine, machine, cache_formula=formula, peak_memory=peak),
    ]
