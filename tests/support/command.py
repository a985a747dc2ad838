"""Run the tgen command in another process."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

_READ_AT_START = ("LC_", "OMP_", "PYTHON")  # by Python or by what it imports

_ENVIRONMENT = dict(os.environ)  # before a test changes it


def tgen(
    *arguments: object,
    stdin: bytes = b"",
    cwd: Path | None = None,
    closed: int | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[bytes]:
    """Run the real command and return its result.

    It is forked from a process with all imports, but a new Python reads variables for Python.
    `closed`: the standard stream without a file, as after `>&-` in a shell.
    """
    words = [str(word) for word in arguments]
    if any(name.startswith(_READ_AT_START) for name in environment):
        return subprocess.run(
            [sys.executable, "-m", "tgen", *words],
            input=stdin,
            capture_output=True,
            cwd=cwd,
            env=clean_environment(**environment),
            check=False,
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").write_bytes(stdin)
        (status,) = fork_server().run(
            [words], folder=folder, cwd=cwd, closed=closed, environment=environment
        )
        out, err = ((folder / f"0.{stream}").read_bytes() for stream in ("out", "err"))
    return subprocess.CompletedProcess(words, status, out, err)


class ForkServer:
    """A process that forks commands: see `forks.py`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("forks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
        )

    def run(
        self,
        arguments: list[list[str]],
        *,
        folder: Path,
        cwd: Path | None = None,
        code: str = "",
        n: int = 0,
        closed: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> list[int]:
        """Run a command per rank, or the same code on `n` ranks; return the exit statuses."""
        request = {"arguments": arguments, "code": code, "n": n, "folder": str(folder.absolute())}
        request |= {"cwd": str(cwd or Path.cwd()), "environment": clean_environment()}
        request |= {"closed": closed}
        request["environment"] |= environment or {}
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            statuses: list[int] = json.loads(self._process.stdout.readline())
        return statuses

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.stdin.close()


fork_server = cache(ForkServer)


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
