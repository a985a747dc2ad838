"""A closed terminal never stops a run, and lost output is never success.

    python tests/faults/terminal.py

The real command trains while its terminal is closed, its stderr is closed or full, its stdout is
full, or the reader of its stdout exits. The run must finish and its model must load; the exit
status is 0, but 1 if a line of --json was lost to an error.
"""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from rich.progress import Progress

import command
import tiny
from command import ForkedCommand
from signals import OPTIONS
from tgen.lora import model_with_adapter
from tgen.runs import log

Command = Callable[..., ForkedCommand]


def main() -> int:
    """Run every case once."""
    tiny.count(__doc__, short=1, long=1)
    command.import_everything()
    signal.alarm(1500)  # seconds, if a case hangs
    problems = []
    cases = (
        terminal_dies,
        terminal_lives,
        stderr_closed,
        stderr_full,
        stdout_full,
        stdout_dies,
        reader_leaves,
        stderr_reader_leaves,
    )
    with tiny.scratch() as folder:
        for case in cases:
            problems += [f"{case.__name__}: {p}" for p in run_case(case, folder)]
        problems += check_refusal(folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{1 + len(cases)} ends of a terminal or a stream: {len(problems)} problems")
    return int(bool(problems))


def run_case(case: Callable[[Command], tuple[int, ForkedCommand]], folder: Path) -> list[str]:
    """Run one case; return the problems."""
    out = folder / case.__name__
    expected, process = case(lambda *more, **streams: train(folder, out, *more, **streams))
    output = process.communicate()[1] or b""
    problems = []
    if process.returncode != expected:
        problems.append(f"exit status {process.returncode}, not {expected}")
    if expected == 1 and b"error: stdout: " not in output:
        problems.append("no error is printed")
    if b"Traceback" in output or b"Exception" in output:
        problems.append("a traceback is printed")
    model_with_adapter.load(out)
    last = log.read(out)[-1]
    if not last.get("finished"):
        problems.append(f"the run ended with {last}")
    return [f"{problem}: {output.decode()}" for problem in problems]


def train(folder: Path, out: Path, *more: str, **streams: Any) -> ForkedCommand:
    """Start the real command."""
    where = ["-o", str(out), "--steps", "20"]
    return ForkedCommand(["train", str(folder / "corpus.txt"), *where, *OPTIONS, *more], **streams)


def terminal_dies(command: Command) -> tuple[int, ForkedCommand]:
    """Close the terminal of all three streams after the first output."""
    parent_end, child_end = pty.openpty()
    process = command(
        stdin=child_end, stdout=child_end, stderr=child_end, close_in_child=[parent_end, child_end]
    )
    os.close(child_end)
    os.read(parent_end, 1)
    os.close(parent_end)
    return 0, process


def terminal_lives(command: Command) -> tuple[int, ForkedCommand]:
    """Keep the terminal open; expect a progress bar and the final line."""
    parent_end, child_end = pty.openpty()
    streams = dict(stdin=child_end, stdout=child_end, stderr=child_end)
    often = partial(Progress, refresh_per_second=1000)  # 20 steps can take 0.1 s
    with mock.patch("tgen.cli.train.progress.Progress", often):
        process = command(**streams, close_in_child=[parent_end, child_end])
    os.close(child_end)
    shown = b""
    with suppress(OSError):  # the terminal is closed
        while piece := os.read(parent_end, 1 << 16):
            shown += piece
    os.close(parent_end)
    return 0 if "━".encode() in shown and b"done: 20 steps" in shown else -1, process


def stderr_closed(command: Command) -> tuple[int, ForkedCommand]:
    """Close stderr as with 2>&-: the next file that is opened gets descriptor 2."""
    return 0, command(closed=2)


def stderr_full(command: Command) -> tuple[int, ForkedCommand]:
    """Write stderr to a full device."""
    with open("/dev/full", "wb") as full:
        return 0, command(stderr=full)


def stdout_full(command: Command) -> tuple[int, ForkedCommand]:
    """Write lines of --json to a full device: the run continues, but the exit status is 1."""
    with open("/dev/full", "wb") as full:
        return 1, command("--json", stdout=full, stderr=subprocess.PIPE)


def stdout_dies(command: Command) -> tuple[int, ForkedCommand]:
    """Close a terminal that receives lines of --json."""
    parent_end, child_end = pty.openpty()
    process = command(
        "--json", stdout=child_end, stderr=subprocess.PIPE, close_in_child=[parent_end, child_end]
    )
    os.close(child_end)
    os.read(parent_end, 1)
    os.close(parent_end)
    return 1, process


def reader_leaves(command: Command) -> tuple[int, ForkedCommand]:
    """Close the pipe that receives lines of --json."""
    process = command("--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    return 0, process


def stderr_reader_leaves(command: Command) -> tuple[int, ForkedCommand]:
    """Close the pipe that receives the progress."""
    read_end, write_end = os.pipe()
    process = command(stderr=write_end, close_in_child=[read_end, write_end])
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)
    return 0, process


def check_refusal(folder: Path) -> list[str]:
    """Check that --json with a closed stdout is an error before the run starts."""
    out = folder / "refused"
    process = train(folder, out, "--json", stderr=subprocess.PIPE, closed=1)
    _, output = process.communicate()
    if process.returncode == 1 and b"stdout is closed" in (output or b"") and not out.exists():
        return []
    return [f"without a stdout: {process.returncode}, {output!r}, {out.exists()}"]


if __name__ == "__main__":
    sys.exit(main())
