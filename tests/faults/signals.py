"""SIGINT, SIGTERM and SIGHUP at random times: the run is saved, or had not started.

    python tests/faults/signals.py [--long | COUNT]

The exit status of the real command is 128 + the signal's number, no traceback is printed, and the
resumed run ends with the bytes of an uninterrupted run. If no run had started, no files are left.
Signals that were ignored from the start (nohup) stay ignored, and a second signal ends the process
at once.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import command
import tiny
from command import SIGNALS, ForkedCommand
from tgen.cli.signals import StopSignal
from tgen.runs import saved_state

STEPS = 20
SETTINGS = (
    "d_model=8 n_layers=1 n_heads=2 context_length=8 batch_size=2 eval_every=10 eval_tokens=64"
)
OPTIONS = ["--tokenizer", "char", "--threads", "1", *(f"--set={s}" for s in SETTINGS.split())]
ENDS = (b"stopped and saved", b"stopped before the first step", b"done: ")
COMPLAINTS = ("Traceback", "Exception ignored", "Error")
NEW_EVERY = 10  # every tenth signal goes to a new interpreter, the others to forked processes

Process = ForkedCommand | subprocess.Popen[bytes]


def main() -> int:
    """Send `count` signals, then check ignored and repeated signals."""
    count = tiny.count(__doc__, short=3, long=1_000)
    command.import_everything()
    rng = random.Random(tiny.seed)
    problems: list[str] = []
    n_started = n_saved = 0
    with tiny.scratch() as folder:
        new = forked = measure(train(folder, "whole"))
        whole = tiny.fingerprint(folder / "whole")
        if count >= NEW_EVERY:
            new = measure(train(folder, "new", new=True))
            problems += tiny.list_differences(tiny.fingerprint(folder / "new"), whole)[:3]
        for i in range(count):
            is_new = i % NEW_EVERY == NEW_EVERY - 1
            process, number = train(folder, "out", new=is_new), SIGNALS[i % len(SIGNALS)]
            wait(process, new if is_new else forked, rng, from_start=is_new)
            process.send_signal(number)
            out = folder / "out"
            _, output = process.communicate()
            n_started += out.exists()
            n_saved += ENDS[0] in (output or b"")
            problems += judge(process.returncode or 0, output or b"", out, number, whole)
            shutil.rmtree(out, ignore_errors=True)
        problems += check_one_signal(folder)
        problems += check_ignored_signals(folder)
        problems += check_second_signal(folder)
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    print(
        f"{count:,} signals, {n_started:,} after the run started, {n_saved:,} stopped it before "
        f"its end: {len(problems)} problems"
    )
    return int(bool(problems))


class Lifetime(NamedTuple):
    """Seconds of a run until its plan and until its end, and its number of output lines."""

    plan_seconds: float
    end_seconds: float
    n_lines: int


def wait_for(process: Process, part: bytes) -> None:
    """Read the output of a process up to a line with `part`."""
    assert process.stdout
    while (line := process.stdout.readline()) and part not in line:
        pass


def measure(process: Process) -> Lifetime:
    """Measure a run without signals."""
    began = time.perf_counter()
    wait_for(process, b"first step")  # the run has started
    plan_seconds = time.perf_counter() - began
    rest, _ = process.communicate()
    return Lifetime(plan_seconds, time.perf_counter() - began, (rest or b"").count(b"\n"))


def wait(process: Process, usual: Lifetime, rng: random.Random, *, from_start: bool) -> None:
    """Wait for a random moment in a run, in its preparation, or after one line of output."""
    when = rng.random()
    if from_start:
        time.sleep(when * usual.end_seconds)
    elif rng.random() < 0.3:
        time.sleep(when * usual.plan_seconds)
    else:
        assert process.stdout
        for _ in range(1 + rng.randrange(usual.n_lines)):
            process.stdout.readline()
        time.sleep(when * (usual.end_seconds - usual.plan_seconds) / usual.n_lines)


def train(folder: Path, out: str, *, new: bool = False, steps: int = STEPS, **more: Any) -> Process:
    """Start `tgen train`, in a forked process or a new interpreter."""
    start = command.start_new if new else ForkedCommand
    where = ["-o", str(folder / out), "--steps", str(steps)]
    return start(
        ["train", str(folder / "corpus.txt"), *where, *OPTIONS, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def judge(
    code: int, output: bytes, out: Path, number: signal.Signals, whole: dict[str, str]
) -> list[str]:
    """Return problems of the exit or of the resumed run."""
    status = code if code >= 0 else 128 - code
    problems = [f"it printed {output.decode()}" for word in COMPLAINTS if word in output.decode()][
        :1
    ]
    if status not in (128 + number, 0):
        problems.append(f"exit status {status}: {output.decode()}")
    if not (saved_state.folder(out) / "run.json").exists():
        if out.exists():
            problems.append(f"files are left: {sorted(map(str, out.rglob('*')))}")
        return problems + (["exit status 0 without a run"] if status == 0 else [])
    request = tiny.request(out.parent, out)
    result = tiny.run_forked(lambda _: list(tiny.run_session(request)) and None)
    if result.status:
        return [*problems, "the run cannot be resumed"]
    if not any(end in output for end in ENDS):
        problems.append(f"no final line was printed: {output.decode()}")
    problems += tiny.list_differences(tiny.fingerprint(out), whole)[:3]
    return [f"{number.name}: {problem}" for problem in problems]


def check_ignored_signals(folder: Path) -> list[str]:
    """Check that ignored signals stay ignored, as under nohup."""
    process = train(folder, "ignoring", ignoring=True)
    wait_for(process, b"first step")
    for number in SIGNALS:
        process.send_signal(number)
    process.communicate()
    return [] if process.returncode == 0 else [f"ignored signals: status {process.returncode}"]


def check_one_signal(folder: Path) -> list[str]:
    """Check that a signal during training stops a long run and saves it."""
    process = train(folder, "once", steps=100_000)
    wait_for(process, b"StepReport")
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate()
    assert output is not None
    if process.returncode == 128 + signal.SIGTERM and ENDS[0] in output:
        return []
    return [f"a signal during training: status {process.returncode}: {output.decode()}"]


def check_second_signal(folder: Path) -> list[str]:
    """Check that a second signal ends the process, once the run has noticed the first."""

    def hold(stop: StopSignal) -> bool:
        if stop.number:
            os.write(1, b"noticed\n")
            signal.pause()
        return stop.number != 0

    with mock.patch.object(StopSignal, "is_requested", hold):  # the forked process keeps it
        process = train(folder, "twice", steps=100_000)
    wait_for(process, b"StepReport")
    process.send_signal(signal.SIGINT)
    wait_for(process, b"noticed")
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate()
    assert output is not None
    saved = tiny.load_newest_state(folder / "twice")
    if process.returncode == 128 + signal.SIGTERM and saved and b"saved" not in output:
        return []
    return [f"a second signal: status {process.returncode}: {output.decode()}"]


if __name__ == "__main__":
    sys.exit(main())
