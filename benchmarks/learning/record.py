"""What a result file holds beside the numbers: how they came about, and on what machine."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tgen

RESULTS = Path(__file__).resolve().parent.parent / "results"


def origin() -> dict[str, Any]:
    """The command, the moment, the machine, the versions."""
    return {
        "command": f"python {shlex.join(sys.argv)}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": _cpu_model(),
            "system": platform.system(),
            "threads": torch.get_num_threads(),
        },
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tgen": tgen.__version__,
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Puts the whole file in place at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def table(rows: list[list[str]]) -> str:
    """Rows of cells, the head first, as aligned columns: the first to the left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
