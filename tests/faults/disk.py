"""A disk that is full, fails or writes short: training goes on, and ends as if nothing had been.

    python tests/faults/disk.py [--long | COUNT]

At each call of the last half of a run that changes the disk, once: no space, and an input/output
error; then a run whose every write takes only a third. The states before stay whole, no temporary
file is left, a report says what happened, and in the end all bytes are as in the run that was left
alone. Where the disk stays full the run ends with an error that names the bytes needed and free. In
the long form also more failures by chance, and real file systems that are too small.
"""

import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
from calls import BROKEN, FULL, Counting, Failing, watched
from tgen.errors import TrainingError
from tgen.reports import EvalReport, PlanReport, RollbackReport, SavingReport
from tgen.runs import RunRequest
from tgen.runs.storage import state

_STEPS, _HALF = 10, 6
_GOES_BACK = {
    "patience": 2, "optimizer": "adamw", "learning_rate": 30, "warmup_steps": 0
}  # fmt: skip
_ROOM = ("open", "mkdir", "write")  # the calls that need some
_SOAK = 0.02  # how often a call fails by chance
_PICKS = Callable[[int, str], bool]


def main() -> int:
    """Every call once; then, in the long form, by chance and on small disks."""
    soak = tiny.count(__doc__, short=10, long=3_000)
    tiny.get_ready()
    with tiny.scratch() as folder:
        disk = Disk(folder)
        for at, error in itertools.product(range(1, disk.n_calls + 1), (FULL, BROKEN)):
            disk.fails(lambda i, _, at=at: i == at, error)
        disk.fails(lambda *_: True, None)
        for at in range(1, disk.n_calls + 1, 5):
            disk.fails(lambda i, name, at=at: i >= at and name in _ROOM, FULL)
        for at in range(1, disk.n_start_calls + 1):
            disk.fails(lambda i, _, at=at: i == at, (FULL, BROKEN)[at % 2], begins=True)
        back = Disk(folder, steps=12, half=1, **_GOES_BACK)
        for at in range(1, back.n_calls + 1, 4):
            end = at + (2, 5, 12)[at % 3]
            back.fails(lambda i, name, a=at, b=end: a <= i < b and name in _ROOM, FULL)
        disk.problems += back.problems
        n_calls, n_reported = disk.n_trials + back.n_trials, disk.n_reported + back.n_reported
        for i in range(soak):
            draws = random.Random(i)
            error = (FULL, BROKEN, None)[i % 3]
            disk.fails(lambda *_, draws=draws: draws.random() < _SOAK, error)
        small = small_disks(disk) if soak > 100 else ""
    for problem in disk.problems[:20]:
        print(problem, file=sys.stderr)
    print(
        f"{n_calls:,} failures, {n_reported:,} of them in a save, and {soak:,} runs of failures by "
        f"chance{small}: {len(disk.problems)} problems"
    )
    return int(bool(disk.problems) or not n_reported)


class Disk:
    """A run that is left alone, its first half, and what befalls copies of that."""

    def __init__(self, folder: Path, *, steps: int = _STEPS, half: int = _HALF, **settings: Any):
        self.folder, self.settings = folder, {"steps": steps, **settings}
        self.problems: list[str] = []
        self.n_trials = self.n_reported = 0
        name = "back" if settings else "plain"
        whole, self.half, self.out = (
            folder / f"{name} {part}" for part in ("whole", "half", "out")
        )
        last = [0]

        def alone(say: Any) -> None:
            counting = Counting()
            with watched(counting):
                for report in tiny.sitting(self.request(whole)):
                    if isinstance(report, PlanReport):
                        say(f"start {len(counting.names)}")
                    elif isinstance(report, RollbackReport):
                        say("back")
            for report in tiny.sitting(self.request(self.half), stopped=lambda: last[0] == half):
                last[0] = getattr(report, "step", 0)
            shutil.copytree(self.half, self.out)
            counting = Counting()
            with watched(counting):
                list(tiny.sitting(self.request(self.out)))
            say(f"rest {len(counting.names)}")

        start, *back, rest = tiny.forked(alone).said
        assert bool(back) == bool(settings)
        self.goes_back = bool(back)
        self.n_start_calls, self.n_calls = (int(said.split()[1]) for said in (start, rest))
        self.whole = tiny.kept(whole)

    def request(self, out: Path) -> RunRequest:
        """The run, there."""
        return tiny.request(self.folder, out, **self.settings)

    def fails(self, picks: _PICKS, error: OSError | None, *, begins: bool = False) -> None:
        """The second half of the run while the picked calls fail, or all where it `begins`; and on
        if it came to no end."""
        shutil.rmtree(self.out, ignore_errors=True)
        if not begins:
            shutil.copytree(self.half, self.out)
        ended = tiny.forked(lambda say: _sitting(self.request(self.out), picks, error, say))
        self.n_trials += 1
        self.n_reported += "not saved" in ended.said
        self.judge(ended)

    def judge(self, ended: tiny.Ended) -> None:
        """Whether a sitting ended as it may, and the run, gone on with, as ever."""
        said = ended.said
        problems = [line for line in said if line.startswith("problem")]
        if ended.status:
            problems.append("it ended with a traceback")
        if "ended" not in said:  # it was refused, or could not save its end
            again = tiny.forked(lambda say: _sitting(self.request(self.out), _never, None, say))
            problems += ["then it could not go on"] if "ended" not in again.said else []
            said = said + again.said
        if not problems and self.goes_back:
            told = [float(line.removeprefix("best ")) for line in said if line.startswith("best")]
            best = json.loads(tiny.kept(self.out)["progress"])["best_bits_per_byte"]
            problems = [f"its best is {best}, not {min(told)}"] if best > min(told) else []
        else:
            problems = problems or tiny.differences(tiny.kept(self.out), self.whole)
        self.problems += [f"{problem} ({ended.said})" for problem in problems]


def _sitting(wanted: RunRequest, picks: _PICKS, error: OSError | None, say: Any) -> None:
    """Says how it went; what is no error for the user is this process's traceback."""
    failing = Failing(picks, error)
    began = waits = False
    before = _newest(wanted.out)
    with watched(failing):
        try:
            for report in tiny.sitting(wanted):
                began = True
                if isinstance(report, SavingReport):
                    waits = bool(report.failed)
                    say("not saved" if waits else "saved again")
                    if waits and report.needed_bytes <= 0:
                        say(f"problem: {report}")
                elif isinstance(report, EvalReport) and report.best:
                    say(f"best {report.bits_per_byte!r}")
            say("problem: the last state was never saved" if waits else "ended")
        except OSError as refused:
            say(f"{'problem: in the middle' if began else 'refused'}: {refused}")
        except TrainingError as at_the_end:
            if not re.search(r"needs [\d,]+ bytes, [\d,]+ are free", at_the_end.message):
                say(f"problem: {at_the_end}")
            say("told at the end")
    if _newest(wanted.out) < before:
        say("problem: an older state than before")
    if (left := tiny.leftovers(wanted.out)) and not failing.names_failed & {"unlink", "rmdir"}:
        say(f"problem: left there: {left}")


def _newest(out: Path) -> int:
    if not (state.folder(out) / "run.json").exists():
        return -1
    saved = state.load_state(out, run_id=state.load_run(out)[0]["run_id"])
    return -1 if saved is None or saved.damaged else int(saved.progress["step"])


def _never(i: int, name: str) -> bool:
    del i, name
    return False


def small_disks(disk: Disk) -> str:
    """Whole runs in file systems from too small to large enough, each then made large enough."""
    disk.out = disk.folder / "mounted" / "out"
    disk.out.parent.mkdir()
    sizes = range(16, 400, 8)
    for kilobytes in sizes:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tgen", str(disk.out.parent)]
        if subprocess.run(mount, capture_output=True).returncode:
            return ", small disks SKIPPED: nothing can be mounted here"
        try:
            ended = tiny.forked(lambda say: _sitting(disk.request(disk.out), _never, None, say))
            larger = ["mount", "-o", "remount,size=16m", str(disk.out.parent)]
            subprocess.run(larger, check=True)
            disk.judge(ended)
        finally:
            subprocess.run(["umount", str(disk.out.parent)], check=True)
    return f", {len(sizes)} small disks"


if __name__ == "__main__":
    sys.exit(main())
