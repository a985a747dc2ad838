"""Simultaneous starts in one directory: one owns the run, the others print its pid and exit.

    python tests/faults/starts.py [--long | COUNT]

Each round forks 16 processes, or 50 in the long form, that start `tgen train` at the same
moment. One continues; the others exit with status 75, name its pid, and have not imported torch. So
does another process while the owner trains, and while it is stopped (SIGSTOP). Once the owner is
killed, the directory is free.
"""

import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import tiny
from tgen import runs
from tgen.cli.app import run
from tgen.cli.train import progress
from tgen.errors import LockedError
from tgen.storage import locks

with suppress(ImportError):
    import pydantic.type_adapter  # noqa: F401  # as newer versions of typer do

_REFUSED = 75


def main() -> int:
    """Run the rounds."""
    rounds = tiny.count(__doc__, short=1, long=100)
    assert runs  # imported by the command before it locks
    assert progress
    assert "torch" not in sys.modules
    n_starts = 50 if rounds > 1 else 16
    problems: list[str] = []
    slowest = 0.0
    with tiny.scratch() as folder:
        for _ in range(rounds):
            seconds, new_problems = run_round(folder, n_starts)
            slowest = max(slowest, seconds)
            problems += new_problems
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    print(
        f"{rounds:,} times {n_starts} starts at once, the last refused after {slowest:.1f} s "
        f"at most: {len(problems)} problems"
    )
    return int(bool(problems))


def run_round(folder: Path, n_starts: int) -> tuple[float, list[str]]:
    """Return the seconds until the last refusal, and the problems."""
    out = folder / "model"
    shutil.rmtree(out, ignore_errors=True)
    read_end, write_end = os.pipe()
    outputs = {
        start(folder, i, waits_for=read_end): folder / f"output-{i}" for i in range(n_starts)
    }
    began = time.perf_counter()
    os.write(write_end, b"!" * n_starts)
    os.close(read_end)
    os.close(write_end)
    problems = []
    refused: list[int] = []
    while len(refused) < n_starts - 1:
        pid, code = os.wait()
        refused.append(pid)
        if (status := os.waitstatus_to_exitcode(code)) != _REFUSED:
            problems.append(f"a start ended with {status}: {outputs[pid].read_text()}")
    seconds = time.perf_counter() - began
    (owner,) = outputs.keys() - set(refused)
    problems += [p for pid in refused if (p := wrong_refusal(outputs[pid].read_text(), owner))]
    while not (out / "training" / "run.json").exists():
        time.sleep(0.01)
    for number in (signal.SIGCONT, signal.SIGSTOP):
        os.kill(owner, number)
        status = os.waitstatus_to_exitcode(os.waitpid(start(folder, n_starts), 0)[1])
        text = (folder / f"output-{n_starts}").read_text()
        if status != _REFUSED or wrong_refusal(text, owner):
            problems.append(f"one more, {number.name}: {status}: {text}")
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    try:
        with locks.lock(out / "training" / "LOCK"):
            pass
    except LockedError as error:
        problems.append(f"after the owner was killed: {error}")
    return seconds, problems


def wrong_refusal(text: str, owner: int) -> str:
    """Return the problem with the output of a refused start; empty: none."""
    if not re.search(rf"in use by process {owner}\n", text):
        return f"the output does not name {owner}: {text}"
    return f"too much output: {text}" if text.count("\n") > 2 else ""


def start(folder: Path, number: int, *, waits_for: int | None = None) -> int:
    """Start `tgen train` with its output in a file; return its pid."""
    if pid := os.fork():
        return pid
    try:
        output = os.open(folder / f"output-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if waits_for is not None:
            os.read(waits_for, 1)
        settings = ["d_model=8", "n_layers=1", "n_heads=2", "context_length=8"]
        options = [part for setting in settings for part in ("--set", setting)]
        out = str(folder / "model")
        status = run(["train", str(folder / "corpus.txt"), "--minutes", "10", "-o", out, *options])
        if "torch" in sys.modules:
            print("torch was imported", file=sys.stderr)
        sys.stderr.flush()
        os._exit(status)
    finally:
        os._exit(70)


if __name__ == "__main__":
    sys.exit(main())
