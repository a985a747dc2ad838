"""INT, TERM and HUP at random times of the real command: its work is saved, or had not begun.

    python tests/faults/signals.py [--long | COUNT]

The exit status is 128 + the signal's number, no traceback is shown, and the run that goes on from
there ends with the bytes of the run that was left alone; where none had begun, nothing is left.
Then: signals that were ignored from the start (nohup) stay ignored, and a second signal ends the
process at once.
"""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import command
import tiny
from command import SIGNALS, Forked
from tgen.runs.storage import state

STEPS = 40
SETTINGS = (
    "d_model=8 n_layers=1 n_heads=2 context_length=8 batch_size=2 eval_every=20 eval_tokens=64"
)
OPTIONS = ["--tokenizer", "char", "--threads", "1", *(f"--set={s}" for s in SETTINGS.split())]
ENDS = (b"stopped and saved", b"stopped before the first step", b"done: ")
COMPLAINTS = ("Traceback", "Exception ignored", "Error")
NEW_EVERY = 10  # so many signals go to forked processes and one to a new interpreter

Process = Forked | subprocess.Popen[bytes]


def main() -> int:
    """So many signals."""
    count = tiny.count(__doc__, short=20, long=1_000)
    command.get_ready()
    draws = random.Random(0)
    problems: list[str] = []
    begun, saved = 0, []
    with tiny.scratch() as folder:
        new, forked = alone(train(folder, "whole", new=True)), alone(train(folder, "forked"))
        whole = tiny.kept(folder / "whole")
        problems += tiny.differences(tiny.kept(folder / "forked"), whole)[:3]
        for number in range(count):
            is_new = number % NEW_EVERY == 0
            process, sent = train(folder, "out", new=is_new), draws.choice(SIGNALS)
            wait(process, new if is_new else forked, draws, from_start=is_new)
            process.send_signal(sent)
            out = folder / "out"
            _, said = process.communicate()
            begun += out.exists()
            saved.append(ENDS[0] in (said or b""))
            problems += judge(process.returncode or 0, said or b"", out, sent, whole)
            shutil.rmtree(out, ignore_errors=True)
        problems += ignored(folder)
        problems += second(folder)
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    print(
        f"{count:,} signals, {begun:,} after the run began, {sum(saved):,} stopped it before its "
        f"end: {len(problems)} problems"
    )
    return int(bool(problems) or not any(saved))


class Lifetime(NamedTuple):
    """How long a run takes to its plan and to its end, in seconds, and how many lines it prints."""

    begins: float
    ends: float
    n_lines: int


def alone(process: Process) -> Lifetime:
    """The run when nothing is sent."""
    began = time.perf_counter()
    assert process.stdout
    process.stdout.readline()  # the plan: it has begun
    begins = time.perf_counter() - began
    rest, _ = process.communicate()
    return Lifetime(begins, time.perf_counter() - began, (rest or b"").count(b"\n"))


def wait(process: Process, usual: Lifetime, draws: random.Random, *, from_start: bool) -> None:
    """Until a random moment: of a run's life, of its preparation, or after one of its lines."""
    when = draws.random()
    if from_start:
        time.sleep(when * usual.ends)
    elif draws.random() < 0.3:
        time.sleep(when * usual.begins)
    else:
        assert process.stdout
        for _ in range(1 + draws.randrange(usual.n_lines)):
            process.stdout.readline()
        time.sleep(when * (usual.ends - usual.begins) / usual.n_lines)


def train(folder: Path, out: str, *, new: bool = False, steps: int = STEPS, **more: Any) -> Process:
    """The real command, at work."""
    begin = command.started if new else Forked
    where = ["-o", str(folder / out), "--steps", str(steps)]
    return begin(
        ["train", str(folder / "corpus.txt"), *where, *OPTIONS, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def judge(
    code: int, said: bytes, out: Path, sent: signal.Signals, whole: dict[str, str]
) -> list[str]:
    """What is wrong with how it ended, or with what comes of the run."""
    status = code if code >= 0 else 128 - code
    problems = [f"it said {said.decode()}" for word in COMPLAINTS if word in said.decode()][:1]
    if status not in (128 + sent, 0):
        problems.append(f"exit status {status}: {said.decode()}")
    if not (state.folder(out) / "run.json").exists():
        if out.exists():
            problems.append(f"it left {sorted(map(str, out.rglob('*')))}")
        return problems + (["exit status 0 without a run"] if status == 0 else [])
    wanted = tiny.request(out.parent, out)
    ended = tiny.forked(lambda _: list(tiny.sitting(wanted)) and None)
    if ended.status:
        return [*problems, "it cannot go on"]
    if not any(end in said for end in ENDS):
        problems.append(f"it ended without a word: {said.decode()}")
    problems += tiny.differences(tiny.kept(out), whole)[:3]
    return [f"{sent.name}: {problem}" for problem in problems]


def ignored(folder: Path) -> list[str]:
    """As under nohup: what was ignored stays so."""
    process = train(folder, "ignoring", ignoring=True)
    assert process.stdout
    process.stdout.readline()
    for number in SIGNALS:
        process.send_signal(number)
    process.communicate()
    return [] if process.returncode == 0 else [f"ignored signals: status {process.returncode}"]


def second(folder: Path) -> list[str]:
    """Two signals that arrive together: the first asks for the end, the second is it."""
    process = train(folder, "twice", steps=100_000)
    assert process.stdout
    process.stdout.readline()
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    _, said = process.communicate()
    assert said is not None
    saved = state.load_state(folder / "twice", run_id=_run(folder / "twice"))
    if process.returncode == 128 + signal.SIGTERM and saved and b"saved" not in said:
        return []
    return [f"a second signal: status {process.returncode}: {said.decode()}"]


def _run(out: Path) -> str:
    return str(state.load_run(out)[0]["run_id"])


if __name__ == "__main__":
    sys.exit(main())
