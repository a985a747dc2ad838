"""Run the tgen command in another process."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from support.forks import serve

_READ_AT_START = ("LC_", "OMP_", "PYTHON", "TGEN_CPU_")  # by Python or by what it imports


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
    """A process that forks commands: see `forks.py`. Made before torch has threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection, other = multiprocessing.Pipe()
        self._pid = os.fork()
        if not self._pid:
            self._connection.close()
            serve(other)
        other.close()

    def start(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """Start Python with these standard streams as a child of this process; return its ID."""
        with self._lock:
            become_parent_of_orphans(True)
            self._connection.send(request)
            for stream in streams:
                send_handle(self._connection, stream, self._pid)
            pid: int = self._connection.recv()
            become_parent_of_orphans(False)
        return pid

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
            self._connection.send(request)
            statuses: list[int] = self._connection.recv()
        return statuses


fork_server = cache(ForkServer)


def become_parent_of_orphans(value: bool) -> None:
    """Let this process be, or not be, the parent of descendants whose parent exits."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, int(value))


class PythonFork(subprocess.Popen):
    """A process whose command starts with `python -m` or `python -c`, forked: see `forks.py`.

    Variables that only a new Python reads have no effect. Other commands start as usual.
    """

    def _execute_child(self, args: Any, *more: Any) -> None:
        cwd, environment = more[4:6]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = more[9:15]
        program, *words = map(str, args)
        safe_path = words[:1] == ["-P"]
        can_fork = sys.platform == "linux" and program == sys.executable
        if not can_fork or words[safe_path] not in ("-m", "-c"):
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        request = {
            "python": words[safe_path:],
            "safe_path": safe_path,
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
        }
        streams = [0 if p2cread < 0 else p2cread, 1 if c2pwrite < 0 else c2pwrite]
        self.pid = fork_server().start(request, [*streams, 2 if errwrite < 0 else errwrite])
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


def start(*arguments: object, **streams: Any) -> subprocess.Popen[bytes]:
    """Start the real command."""
    return PythonFork(
        [sys.executable, "-m", "tgen", *map(str, arguments)], env=clean_environment(), **streams
    )


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment with one thread, 100 columns and default warnings."""
    return (
        os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONWARNINGS": "default"} | more
    )
