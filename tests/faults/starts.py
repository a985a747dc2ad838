"""50 starts at once in one directory: one owns the run, the others say whose it is and leave.

    python tests/faults/starts.py [--long | COUNT]

Each round forks 50 processes that run `tgen train`, all let go at the same moment. One goes on; the
others exit with 75, name its pid, and have not imported torch. So does one more while the owner
trains, and while it is stopped (SIGSTOP); once it is killed the directory is free.
"""

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pydantic.type_adapter  # as typer does

import tiny
from tgen import runs
from tgen.cli.app import run
from tgen.cli.train import progress
from tgen.errors import LockedError
from tgen.storage import locks

_STARTS = 50
_REFUSED = 75


def main() -> int:
    """So many rounds."""
    rounds = tiny.count(__doc__, short=1, long=100)
    assert pydantic.type_adapter
    assert runs  # what the command imports before it asks for the lock
    assert progress
    assert "torch" not in sys.modules
    problems: list[str] = []
    slowest = 0.0
    with tiny.scratch() as folder:
        for _ in range(rounds):
            seconds, found = one_round(folder)
            slowest = max(slowest, seconds)
            problems += found
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    print(
        f"{rounds:,} times {_STARTS} starts at once, the last refused after {slowest:.1f} s "
        f"at most: {len(problems)} problems"
    )
    return int(bool(problems))


def one_round(folder: Path) -> tuple[float, list[str]]:
    """Seconds until the last was refused, and what was wrong."""
    out = folder / "model"
    shutil.rmtree(out, ignore_errors=True)
    go_here, go_there = os.pipe()
    said = {start(folder, i, waits_for=go_here): folder / f"said-{i}" for i in range(_STARTS)}
    began = time.perf_counter()
    os.write(go_there, b"!" * _STARTS)
    os.close(go_here)
    os.close(go_there)
    problems = []
    refused: list[int] = []
    while len(refused) < _STARTS - 1:
        pid, code = os.wait()
        refused.append(pid)
        if (status := os.waitstatus_to_exitcode(code)) != _REFUSED:
            problems.append(f"a start ended with {status}: {said[pid].read_text()}")
    seconds = time.perf_counter() - began
    (owner,) = said.keys() - set(refused)
    problems += [p for pid in refused if (p := wrongly_refused(said[pid].read_text(), owner))]
    while not (out / "training" / "run.json").exists():
        time.sleep(0.01)
    for number in (signal.SIGCONT, signal.SIGSTOP):
        os.kill(owner, number)
        status = os.waitstatus_to_exitcode(os.waitpid(start(folder, _STARTS), 0)[1])
        text = (folder / f"said-{_STARTS}").read_text()
        if status != _REFUSED or wrongly_refused(text, owner):
            problems.append(f"one more, {number.name}: {status}: {text}")
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    try:
        with locks.lock(out / "training" / "LOCK"):
            pass
    except LockedError as error:
        problems.append(f"after the owner was killed: {error}")
    return seconds, problems


def wrongly_refused(text: str, owner: int) -> str:
    """What a refused start should have said otherwise."""
    if not re.search(rf"in use by process {owner}\n", text):
        return f"it did not name {owner}: {text}"
    return f"it said more: {text}" if text.count("\n") > 2 else ""


def start(folder: Path, number: int, *, waits_for: int | None = None) -> int:
    """The pid of a process that runs `tgen train`, with all it says in a file."""
    if pid := os.fork():
        return pid
    try:
        said = os.open(folder / f"said-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        if waits_for is not None:
            os.read(waits_for, 1)
        settings = ["d_model=8", "n_layers=1", "n_heads=2", "context_length=8"]
        options = [part for setting in settings for part in ("--set", setting)]
        out = str(folder / "model")
        status = run(["train", str(folder / "corpus.txt"), "--minutes", "10", "-o", out, *options])
        if "torch" in sys.modules:
            print("and it has imported torch", file=sys.stderr)
        sys.stderr.flush()
        os._exit(status)
    finally:
        os._exit(70)


if __name__ == "__main__":
    sys.exit(main())
