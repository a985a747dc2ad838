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
from typing import Any

import tiny
from tgen.checkpoint import run_state

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEPS = 40
SETTINGS = (
    "d_model=8 n_layers=1 n_heads=2 context_length=8 batch_size=2 eval_every=5 eval_tokens=64"
)
OPTIONS = ["--tokenizer", "char", "--threads", "1", *(f"--set={s}" for s in SETTINGS.split())]
ENDS = (b"stopped and saved", b"stopped before the first step", b"done: ")
COMPLAINTS = ("Traceback", "Exception ignored", "Error")


def main() -> int:
    """So many signals."""
    count = tiny.count(__doc__, short=20, long=1_000)
    tiny.get_ready(cheap=False)
    draws = random.Random(0)
    problems: list[str] = []
    begun, saved = 0, []
    with tiny.scratch() as folder:
        starts_in, lasts = alone(folder)
        whole = tiny.kept(folder / "whole")
        for _ in range(0, count, 2):  # two at a time, to be quick
            pair = [command(folder, f"out-{k}") for k in range(2)]
            sent = [draws.choice(SIGNALS) for _ in pair]
            is_early = draws.random() < 0.3
            time.sleep(draws.random() * starts_in if is_early else 0)
            for k, process in enumerate(pair):
                if not is_early:
                    assert process.stdout
                    process.stdout.readline()  # the plan: it has begun
                    time.sleep(draws.random() * lasts)
                process.send_signal(sent[k])
            for k, process in enumerate(pair):
                begun += (folder / f"out-{k}").exists()
                problems += judge(process, folder / f"out-{k}", sent[k], whole, saved)
                shutil.rmtree(folder / f"out-{k}", ignore_errors=True)
        problems += ignored(folder)
        problems += second(folder)
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    print(
        f"{count:,} signals, {begun:,} after the run began, {sum(saved):,} stopped it before its "
        f"end: {len(problems)} problems"
    )
    return int(bool(problems) or not any(saved))


def alone(folder: Path) -> tuple[float, float]:
    """Seconds until the run begins, and from there to its end, when nothing is sent."""
    began = time.perf_counter()
    process = command(folder, "whole")
    assert process.stdout
    process.stdout.readline()
    planned = time.perf_counter()
    process.communicate()
    return planned - began, time.perf_counter() - planned


def command(folder: Path, out: str, **more: Any) -> subprocess.Popen[bytes]:
    """The real command, at work."""
    tgen = [sys.executable, "-m", "tgen", "train", str(folder / "corpus.txt")]
    steps = ["--steps", str(more.pop("steps", STEPS)), "-o", str(folder / out)]
    restored = more.pop("preexec_fn", lambda: [signal.signal(n, signal.SIG_DFL) for n in SIGNALS])
    return subprocess.Popen(
        [*tgen, *steps, *OPTIONS, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=restored,
        **more,
    )


def judge(
    process: subprocess.Popen[bytes],
    out: Path,
    sent: signal.Signals,
    whole: dict[str, str],
    saved: list[bool],
) -> list[str]:
    """What is wrong with how it ended, or with what comes of the run."""
    _, said = process.communicate()
    saved.append(ENDS[0] in said)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    problems = [f"it said {said.decode()}" for word in COMPLAINTS if word in said.decode()][:1]
    if status not in (128 + sent, 0):
        problems.append(f"exit status {status}: {said.decode()}")
    if not (run_state.folder(out) / "run.json").exists():
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

    def ignore() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    process = command(folder, "ignoring", preexec_fn=ignore)
    assert process.stdout
    process.stdout.readline()
    for number in SIGNALS:
        process.send_signal(number)
    process.communicate()
    return [] if process.returncode == 0 else [f"ignored signals: status {process.returncode}"]


def second(folder: Path) -> list[str]:
    """Two signals that arrive together: the first asks for the end, the second is it."""
    process = command(folder, "twice", steps=100_000)
    assert process.stdout
    process.stdout.readline()
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    _, said = process.communicate()
    saved = run_state.load_state(folder / "twice", run=_run(folder / "twice"))
    if process.returncode == 128 + signal.SIGTERM and saved and b"saved" not in said:
        return []
    return [f"a second signal: status {process.returncode}: {said.decode()}"]


def _run(out: Path) -> str:
    return str(run_state.load_run(out)[0]["run_id"])


if __name__ == "__main__":
    sys.exit(main())
