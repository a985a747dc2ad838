"""The output of `tgen models`: a table or JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from rich.text import Text

from tgen.cli import console
from tgen.cli.rich_console import out
from tgen.drawing.tables import table
from tgen.drawing.terminal_text import json_line, one_line
from tgen.reports.models import ModelReport
from tgen.reports.number_format import format_bytes

_SCHEMA = "tgen.models/1"


def print_table(reports: Sequence[ModelReport], *, quiet: bool) -> None:
    """Print one row per model to stdout, and problems to stderr."""
    rows = table(
        "name", "family", ">parameters", "dtype", ">context", ">size", ">written", "found in"
    )
    for report in reports:
        rows.add_row(
            Text(report.name, style="bold" if report.is_default else ""),
            Text(kind(report) or "–"),
            _number(report.n_parameters),
            report.dtype or "–",
            _number(report.context_length),
            format_bytes(report.n_bytes),
            "–" if report.modified is None else _local_time(report.modified),
            Text(report.found_by),
        )
    console.show(rows, wrap=out.is_terminal)  # only a terminal has a width
    for report in reports:
        if report.is_default:
            console.print_status(f"default: {report.name}", quiet=quiet)
        if report.problem:
            console.print_status(f"warning: {report.name}: {report.problem}", quiet=quiet)


def print_json(reports: Sequence[ModelReport]) -> None:
    """Write one JSON object to stdout."""
    rows = [
        asdict(report)
        | {
            "modified": None
            if report.modified is None
            else datetime.fromtimestamp(report.modified, UTC).isoformat(timespec="seconds"),
            "problem": report.problem or None,
        }
        for report in reports
    ]
    console.write(json_line({"schema": _SCHEMA, "models": rows}))


def kind(report: ModelReport) -> str:
    """Return the family of a model, or the base and rank of an adapter; "" if unknown."""
    if report.adapter_of is None:
        return report.family or ""
    rank = "" if report.rank is None else f", rank {report.rank}"
    return one_line(f"adapter of {report.adapter_of}{rank}")


def _number(n: int | None) -> str:
    return "–" if n is None else f"{n:,}"


def _local_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
