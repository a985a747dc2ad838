"""Run the tgen command as a subprocess."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def tgen(
    *arguments: object, stdin: bytes = b"", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the real command and return its result."""
    return subprocess.run(
        [sys.executable, "-m", "tgen", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        cwd=cwd,
        env=clean_environment(**environment),
        timeout=120,
        check=False,
    )


def start(*arguments: object, **streams: Any) -> subprocess.Popen[bytes]:
    """Start the real command."""
    return subprocess.Popen(
        [sys.executable, "-m", "tgen", *map(str, arguments)], env=clean_environment(), **streams
    )


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment with one thread, 100 columns and default warnings."""
    return (
        os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONWARNINGS": "default"} | more
    )
