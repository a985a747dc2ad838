"""Files that a command writes beside or instead of its output, one per option."""

import csv
import io
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tgen.cli import console
from tgen.cli.options import check_output_file
from tgen.config.option import option
from tgen.drawing.terminal_text import label
from tgen.errors import UsageError
from tgen.storage import files

FILES = "Files"  # panel of the options
_BINARY = ("--png", "--activations")


def file_option(help_text: str, flag: str) -> Any:
    """Return the option of a file to write."""
    return option(None, help_text, flag, panel=FILES, metavar="FILE")


def output_files(options: Any) -> dict[str, Path]:
    """Return the files to write, by flag."""
    named = (one for one in fields(options) if one.metadata.get("panel") == FILES)
    paths = {one.metadata["flags"][0]: getattr(options, one.name) for one in named}
    return {flag: path for flag, path in paths.items() if path is not None}


def check_output_files(outputs: Mapping[str, Path]) -> None:
    """Raise UsageError if one of the files, by flag, cannot be written."""
    for name, path in outputs.items():
        if str(path) != "-":
            check_output_file(name, path)
    targets = {path if str(path) == "-" else path.resolve() for path in outputs.values()}
    if len(targets) < len(outputs):
        raise UsageError(
            f"{' and '.join(outputs)}: same output file",
            "name a different file for each; only one can go to stdout",
        )
    for name in _BINARY:
        if str(outputs.get(name)) == "-" and sys.stdout is not None and sys.stdout.isatty():
            raise UsageError(f"{name}: cannot write a binary file to the terminal", "name a file")


def write_contents(contents: Mapping[str, files.Content], outputs: Mapping[str, Path]) -> None:
    """Write the contents of the files, by flag."""
    for name, path in outputs.items():
        if str(path) == "-":
            for block in files.blocks(contents[name]):
                console.write(bytes(block))
        else:
            files.write_output(path, contents[name])
            size = f"{sum(map(len, files.blocks(contents[name]))):,} bytes"
            console.print_status(f"wrote {path}, {size}")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    r"""Return rows as CSV (RFC 4180, but with \n line ends).

    Floats have nine digits, which restore any float32 exactly.
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, bytes):
        return label(value)
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else value
