"""`--view sources`: passages of a text that also occur in the training text. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tgen.cli import console
from tgen.cli.inspect.options import InspectOptions
from tgen.cli.json_output import json_line
from tgen.cli.output_options import csv_text, write_contents
from tgen.drawing.tables import sources_table
from tgen.drawing.terminal_text import decode_printable, printable
from tgen.errors import UsageError
from tgen.inspection.sources import PLACES, TOP, find_sources
from tgen.reports.inspection import SourcesReport
from tgen.reports.json_text import json_value

_LISTED_PLACES = 3  # of a passage in a table


def search_sources(path: Path, text: bytes, options: InspectOptions) -> SourcesReport:
    """Return the passages of a text that the training text of the run at `path` has."""
    from tgen.runs.text_sources import open_training_text

    def warn(problem: str) -> None:
        console.print_status(f"warning: {problem}")

    with console.late_progress("indexing the training text") as progress:
        index = open_training_text(path, warn, progress)
    places = PLACES if options.json or options.files else _LISTED_PLACES
    return find_sources(index, text, top=options.top or TOP, places=places)


def source_rows(report: SourcesReport) -> Iterator[tuple[object, ...]]:
    """Yield the header and one row per place of a CSV file."""
    yield "start", "end", "passage", "occurrences", "file", "line", "before", "after"
    for one in report.passages:
        for place in one.places:
            passage, *around = map(decode_printable, (one.text, place.before, place.after))
            numbers = one.start, one.end, passage, one.occurrences
            yield *numbers, printable(place.file), place.line, *around


def print_sources(path: Path, text: bytes, options: InspectOptions) -> None:
    """Print the passages as a table or as JSON, or write them as CSV."""
    if not text:
        raise UsageError("the prompt is empty", "pass at least one character")
    report = search_sources(path, text, options)
    console.print_status(f"{path}")
    if options.json:
        record: dict[str, Any] = {"schema": "tgen.inspect.sources/1"}
        console.write(json_line(record | json_value(report)))
        return
    if options.files:
        write_contents({"--csv": csv_text(source_rows(report)).encode()}, options.files)
        return
    from tgen.cli.rich_console import out

    out.width = options.width or out.width
    lines = sources_table(report, width=out.width)
    console.show(*lines, wrap=out.is_terminal or options.width is not None)
