"""A terminal that dies never stops a run, and output that was lost is never success.

    python tests/faults/terminal.py

The real command trains while its terminal is closed, its stderr is closed or full, its stdout is
full or its reader leaves. The run must come to its end and its model must load; the exit status is
0, but 1 where a line of --json was lost to an error.
"""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import command
import tiny
from command import Forked
from signals import OPTIONS, Process
from tgen.checkpoint import model_dir
from tgen.runs.storage import log

Command = Callable[..., Process]


def main() -> int:
    """All of them, once."""
    tiny.count(__doc__, short=1, long=1)
    command.get_ready()
    signal.alarm(300)  # none is to wait for ever
    problems = []
    cases = (
        terminal_dies,
        terminal_lives,
        stderr_closed,
        stderr_full,
        stdout_full,
        stdout_dies,
        reader_leaves,
    )
    with tiny.scratch() as folder:
        for case in cases:
            problems += [f"{case.__name__}: {p}" for p in tried(case, folder)]
        problems += refused(folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{1 + len(cases)} ends of a terminal or a stream: {len(problems)} problems")
    return int(bool(problems))


def tried(case: Callable[[Command], tuple[int, Process]], folder: Path) -> list[str]:
    """What is wrong with a run that this happens to."""
    out = folder / case.__name__
    wanted, process = case(lambda *more, **streams: train(folder, out, *more, **streams))
    said = process.communicate()[1] or b""
    problems = []
    if process.returncode != wanted:
        problems.append(f"exit status {process.returncode}, not {wanted}")
    if wanted == 1 and b"stdout cannot be written" not in said:
        problems.append("nobody is told")
    if b"Traceback" in said or b"Exception" in said:
        problems.append("it shows its insides")
    model_dir.load(out)
    last = log.read(out)[-1]
    if not last.get("finished"):
        problems.append(f"the run ended with {last}")
    return [f"{problem}: {said.decode()}" for problem in problems]


def train(folder: Path, out: Path, *more: str, new: bool = False, **streams: Any) -> Process:
    """The real command; in a new interpreter where that looks at its terminal as it begins."""
    begin = command.started if new else Forked
    where = ["-o", str(out), "--steps", "40"]
    return begin(["train", str(folder / "corpus.txt"), *where, *OPTIONS, *more], **streams)


def terminal_dies(command: Command) -> tuple[int, Process]:
    """All three streams are a terminal, which goes once it has shown something."""
    here, there = pty.openpty()
    process = command(new=True, stdin=there, stdout=there, stderr=there)
    os.close(there)
    os.read(here, 1)
    os.close(here)
    return 0, process


def terminal_lives(command: Command) -> tuple[int, Process]:
    """The other way round: it stays, and shows a bar and the end."""
    here, there = pty.openpty()
    process = command(new=True, stdin=there, stdout=there, stderr=there)
    os.close(there)
    shown = b""
    with suppress(OSError):  # at its end
        while piece := os.read(here, 1 << 16):
            shown += piece
    os.close(here)
    return 0 if "━".encode() in shown and b"done: 40 steps" in shown else -1, process


def stderr_closed(command: Command) -> tuple[int, Process]:
    """As with 2>&-: the next file that is opened gets its number."""
    return 0, command(new=True, preexec_fn=lambda: os.close(2))


def stderr_full(command: Command) -> tuple[int, Process]:
    """As on a full disk."""
    with open("/dev/full", "wb") as full:
        return 0, command(stderr=full)


def stdout_full(command: Command) -> tuple[int, Process]:
    """Lines of JSON are lost: the run goes on, but this is no success."""
    with open("/dev/full", "wb") as full:
        return 1, command("--json", stdout=full, stderr=subprocess.PIPE)


def stdout_dies(command: Command) -> tuple[int, Process]:
    """A terminal that showed lines of JSON goes."""
    here, there = pty.openpty()
    process = command("--json", stdout=there, stderr=subprocess.PIPE, not_theirs=[here, there])
    os.close(there)
    os.read(here, 1)
    os.close(here)
    return 1, process


def reader_leaves(command: Command) -> tuple[int, Process]:
    """Whoever wanted lines of JSON has enough of them."""
    process = command("--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    return 0, process


def refused(folder: Path) -> list[str]:
    """With no stdout at all --json is refused before anything begins."""
    out = folder / "refused"
    process = train(
        folder, out, "--json", new=True, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1)
    )
    _, said = process.communicate()
    if process.returncode == 1 and b"stdout is closed" in (said or b"") and not out.exists():
        return []
    return [f"without a stdout: {process.returncode}, {said!r}, {out.exists()}"]


if __name__ == "__main__":
    sys.exit(main())
