"""`--view training`: a run's log as a figure, files or JSON. Does not import torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from tgen.cli import console
from tgen.cli.inspect.options import InspectOptions
from tgen.cli.json_output import json_line
from tgen.cli.output_options import csv_text, write_contents
from tgen.cli.rich_console import curve_width, out
from tgen.drawing.training_figure import training_figure, training_plot
from tgen.reports.json_text import json_value
from tgen.runs.curves import training_curves

_STEP_FIELDS = ("step", "seconds", "loss", "learning_rate", "tokens_per_second")


def print_training_log(path: Path, options: InspectOptions) -> None:
    """Print the training figure of the model directory `path`, or its log records as JSON, or write
    the curves as files."""
    from tgen.runs import log

    records = log.read(path)
    if options.json:
        record = {"schema": "tgen.inspect.training/1", "records": json_value(records)}
        console.print_status(f"{path}")
        console.write(json_line(record))
        return
    if options.files:
        contents = {flag: _content(flag, records) for flag in options.files}
        write_contents(contents, options.files)
        return
    lines = training_lines(records)
    console.print_status(f"{path}")
    console.show(*lines, wrap=out.is_terminal)


def _content(flag: str, records: Sequence[dict[str, Any]]) -> bytes:
    from tgen.drawing.curve_files import png, svg

    plot = training_plot(training_curves(records))  # an invalid log has no CSV either
    if flag == "--csv":
        return csv_text(_rows(records)).encode()
    return png(plot) if flag == "--png" else svg(plot).encode()


def _rows(records: Sequence[dict[str, Any]]) -> Iterator[Sequence[object]]:
    """Yield the header of a CSV and a row per StepReport, also with the evaluation of that step."""
    evaluations = {record["step"]: record for record in records if record["kind"] == "EvalReport"}
    yield *_STEP_FIELDS, "validation_loss", "validation_bits_per_byte"
    for record in records:
        if record["kind"] == "StepReport":
            found = evaluations.get(record["step"], {})
            after = found.get("loss"), found.get("bits_per_byte")
            yield *(record.get(name) for name in _STEP_FIELDS), *after


def training_lines(records: Sequence[dict[str, Any]]) -> list[Text]:
    """Return the training figure of a log's records, for stdout's width."""
    return training_figure(training_curves(records), width=curve_width())
