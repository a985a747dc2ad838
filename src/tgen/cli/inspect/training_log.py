"""How a run went: its curves in the terminal, or its records as JSON. Torch is not needed."""

import json
from pathlib import Path
from typing import Any

from tgen.cli import console

_PLAIN_WIDTH = 80  # columns where there is no terminal to fit


def print_training_log(path: Path, *, json_output: bool, quiet: bool) -> None:
    """The run of the model directory `path`."""
    from tgen.runs.storage import log

    if json_output:
        record = {"schema": "tgen.inspect.training/1", "records": log.read(path)}
        console.print_status(f"{path}", quiet=quiet)
        console.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        return
    lines = training_lines(path)
    console.print_status(f"{path}", quiet=quiet)
    if console.out.is_terminal:
        console.show(*lines)
    else:
        console.write("".join(f"{line.plain}\n" for line in lines).encode())


def training_lines(path: Path) -> list[Any]:
    """The figure of its losses."""
    from tgen.cli.inspect.tables.training_curves import training_figure
    from tgen.inspection.training_curves import training_curves
    from tgen.runs.storage import log

    width = console.out.width if console.out.is_terminal else _PLAIN_WIDTH
    return training_figure(training_curves(log.read(path)), width=width)
