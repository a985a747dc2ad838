"""A disk that is full, fails or writes too little: training continues, and its result is the same.

    python tests/faults/disk.py [--long | COUNT]

Every 16th call of the second half of a run that changes the disk fails with "no space" or
"input/output error", in turn for each kind of call; then every write of a run writes only a
third. Earlier states stay intact, no temporary file remains, a report describes the failure, and at
the end all bytes equal those of an undisturbed run. If the disk stays full, the run ends with an
error with the bytes needed and free. The long form fails every call, with both errors, and adds
random failures and real file systems that are too small.
"""

import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tiny
from calls import BROKEN, FULL, CallCounter, FailingCalls, intercept_calls
from tgen.errors import TrainingError
from tgen.reports.training import EvalReport, RollbackReport, SavingReport
from tgen.runs import RunRequest, saved_state

_STEPS, _HALF = 10, 6
_ROLLS_BACK = {
    "patience": 2, "optimizer": "adamw", "learning_rate": 30, "warmup_steps": 0
}  # fmt: skip
_ROOM = ("open", "mkdir", "write")  # the calls that need space
_SOAK = 0.02  # probability that a call fails
_FailsAt = Callable[..., bool]  # (number of the call, its name)


def main() -> int:
    """Fail every call; the long form also fails calls at random and uses small disks."""
    soak = tiny.count(__doc__, short=2, long=3_000)
    tiny.import_everything()
    is_long = soak > 100
    with tiny.scratch() as folder:
        disk = Disk(folder)
        n_before: Counter[str] = Counter()  # calls of each kind
        for at, call in enumerate(disk.calls, 1):
            # Saves repeat their calls: take the first of each kind, then others each time.
            if is_long or at % 28 == 0 or not n_before[call]:
                for error in (FULL, BROKEN) if is_long else [(FULL, BROKEN)[n_before[call] % 2]]:
                    disk.fails(lambda i, _, at=at: i == at, error)
            n_before[call] += 1
        disk.fails(lambda *_: True, None)
        for at in range(1, disk.n_calls + 1, 5 if is_long else 67):
            disk.fails(lambda i, name, at=at: i >= at and name in _ROOM, FULL)
        for at in range(1, disk.n_start_calls + 1, 1 if is_long else 19):
            disk.fails(lambda i, _, at=at: i == at, (FULL, BROKEN)[at % 2], begins=True)
        back = Disk(folder, steps=12, half=1, **_ROLLS_BACK)
        for at in range(1, back.n_calls + 1, 4 if is_long else 67):
            end = at + (2, 5, 12)[at % 3]
            back.fails(lambda i, name, a=at, b=end: a <= i < b and name in _ROOM, FULL)
        disk.problems += back.problems
        n_calls, n_reported = disk.n_trials + back.n_trials, disk.n_reported + back.n_reported
        for i in range(soak):
            rng = random.Random(tiny.seed + i)
            disk.fails(lambda *_, rng=rng: rng.random() < _SOAK, (FULL, BROKEN, None)[i % 3])
        small = small_disks(disk) if is_long else ""
    for problem in disk.problems[:20]:
        print(problem, file=sys.stderr)
    print(
        f"{n_calls:,} failures, {n_reported:,} of them in a save, and {soak:,} runs with random "
        f"failures{small}: {len(disk.problems)} problems"
    )
    return int(bool(disk.problems) or not n_reported)


class Disk:
    """An undisturbed run, its first half, and copies of that half that continue with failures."""

    def __init__(self, folder: Path, *, steps: int = _STEPS, half: int = _HALF, **settings: Any):
        self.folder, self.settings = folder, {"steps": steps, **settings}
        self.problems: list[str] = []
        self.n_trials = self.n_reported = 0
        name = "back" if settings else "plain"
        whole, self.half, self.out = (
            folder / f"{name} {part}" for part in ("whole", "half", "out")
        )
        last = [0]

        def run_alone(report_line: Any) -> None:
            counter = CallCounter()
            with intercept_calls(counter):
                for report in tiny.run_session(self.request(whole)):
                    if tiny.is_start(report):
                        report_line(f"start {len(counter.names)}")
                    elif isinstance(report, RollbackReport):
                        report_line("back")
            for report in tiny.run_session(
                self.request(self.half), stopped=lambda: last[0] == half
            ):
                last[0] = getattr(report, "step", 0)
            shutil.copytree(self.half, self.out)
            counter = CallCounter()
            with intercept_calls(counter):
                list(tiny.run_session(self.request(self.out)))
            report_line(f"rest {' '.join(counter.names)}")

        start, *back, rest = tiny.run_here(run_alone).lines
        assert bool(back) == bool(settings)
        self.rolls_back = bool(back)
        self.n_start_calls, self.calls = int(start.split()[1]), rest.split()[1:]
        self.n_calls = len(self.calls)
        self.whole = tiny.fingerprint(whole)

    def request(self, out: Path) -> RunRequest:
        """Request the run in `out`."""
        return tiny.request(self.folder, out, **self.settings)

    def fails(self, fails_at: _FailsAt, error: OSError | None, *, begins: bool = False) -> None:
        """Run the second half, or all if `begins`, with failing calls; then resume to the end."""
        shutil.rmtree(self.out, ignore_errors=True)
        if not begins:
            shutil.copytree(self.half, self.out)
        result = _try_session(self.request(self.out), fails_at, error)
        self.n_trials += 1
        self.n_reported += "not saved" in result.lines
        self.judge(result)

    def judge(self, result: tiny.Result) -> None:
        """Check how a session ended, and that the run then resumes to the same result."""
        lines = result.lines
        problems = [line for line in lines if line.startswith("problem")]
        if result.status:
            problems.append("the session ended with a traceback")
        if "ended" not in lines:  # the session did not start, or could not save at its end
            again = _try_session(self.request(self.out))
            problems += ["the run could not be resumed"] if "ended" not in again.lines else []
            lines = lines + again.lines
        if not problems and self.rolls_back:
            reported = min(float(line.split()[1]) for line in lines if line.startswith("best"))
            best = json.loads(tiny.fingerprint(self.out)["progress"])["best_bits_per_byte"]
            problems = [f"{best} bits per byte, not {reported}"] if best > reported else []
        else:
            problems = problems or tiny.list_differences(tiny.fingerprint(self.out), self.whole)
        self.problems += [f"{problem} ({result.lines})" for problem in problems]


def _try_session(
    request: RunRequest, fails_at: _FailsAt = lambda *_: False, error: OSError | None = None
) -> tiny.Result:
    return tiny.run_here(partial(_run_session, request, fails_at, error))


def _run_session(
    request: RunRequest, fails_at: _FailsAt, error: OSError | None, report_line: Any
) -> None:
    """Run a session and report its end; an unexpected error ends with a traceback."""
    calls_hook = FailingCalls(fails_at, error)
    has_started = save_failed = False
    old_step = _newest_step(request.out)
    with intercept_calls(calls_hook):
        try:
            for report in tiny.run_session(request):
                has_started = has_started or tiny.is_start(report)
                if isinstance(report, SavingReport):
                    save_failed = bool(report.failed)
                    report_line("not saved" if save_failed else "saved again")
                    if save_failed and report.needed_bytes <= 0:
                        report_line(f"problem: {report}")
                elif isinstance(report, EvalReport) and report.best:
                    report_line(f"best {report.bits_per_byte!r}")
            report_line("problem: the last state was never saved" if save_failed else "ended")
        except OSError as refused:
            report_line(f"{'problem: in the middle' if has_started else 'refused'}: {refused}")
        except TrainingError as at_the_end:
            if not re.search(r"needs [\d,]+ bytes, [\d,]+ are free", at_the_end.message):
                report_line(f"problem: {at_the_end}")
            report_line("error at the end")
    if _newest_step(request.out) < old_step:
        report_line("problem: an older state than before the session")
    if (left := tiny.leftovers(request.out)) and not calls_hook.names_failed & {"unlink", "rmdir"}:
        report_line(f"problem: temporary files: {left}")


def _newest_step(out: Path) -> int:
    if not saved_state.has_run(out):
        return -1
    saved = tiny.load_newest_state(out)
    return -1 if saved is None or saved.damaged else int(saved.progress["step"])


def small_disks(disk: Disk) -> str:
    """Run on file systems from too small to large enough, then enlarge each and resume."""
    disk.out = disk.folder / "mounted" / "out"
    disk.out.parent.mkdir()
    sizes = range(16, 400, 8)
    for kilobytes in sizes:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tgen", str(disk.out.parent)]
        if subprocess.run(mount, capture_output=True).returncode:
            return ", small disks SKIPPED: mounting is not permitted"
        try:
            result = _try_session(disk.request(disk.out))
            larger = ["mount", "-o", "remount,size=16m", str(disk.out.parent)]
            subprocess.run(larger, check=True)
            disk.judge(result)
        finally:
            subprocess.run(["umount", str(disk.out.parent)], check=True)
    return f", {len(sizes)} small disks"


if __name__ == "__main__":
    sys.exit(main())
