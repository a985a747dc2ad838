"""SIGKILL during training, then resume: nothing saved is lost, and no byte differs.

    python tests/faults/kills.py [--long | COUNT]

The process dies at its k-th system call that changes the disk: at every k in the first session, at
random calls in later ones. After each kill the newest state and the best weights must be the last
reported ones or later ones; at the end all files must equal those of an uninterrupted run.
"""

import itertools
import random
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import tiny
from calls import CallCounter, Killer, intercept_calls
from tgen.checkpoint import model_files
from tgen.checkpoint.stored_models import ADAPTER_WEIGHTS, is_adapter
from tgen.lora import model_with_adapter
from tgen.reports.training import RollbackReport
from tgen.runs import RunRequest

SCENARIOS: dict[str, dict[str, Any]] = {
    "improves": {},
    "adapter": {"lora": 2, "eval_every": 2},
    "restores its best": {  # the first evaluation is the best
        "patience": 2, "optimizer": "adamw", "learning_rate": 30, "warmup_steps": 0, "steps": 12
    },
}  # fmt: skip


def main() -> int:
    """Kill runs until the count is reached."""
    count = tiny.count(__doc__, short=18, long=20_000)
    tiny.import_everything()
    kills, lost, different = 0, 0, 0
    with tiny.scratch() as folder:
        base = tiny.request(folder, folder / "base", steps=2)
        tiny.run_forked(lambda _: list(tiny.run_session(base)) and None)
        scenarios = [Scenario(folder, name) for name in SCENARIOS]
        rng = random.Random(tiny.seed)
        for i in itertools.count():
            scenario = scenarios[i % len(scenarios)]
            # Every call once, in a mixed order, so that a few kills cover the whole run.
            first = i // len(scenarios) * 101 % scenario.n_calls + 1
            n, problems = scenario.kill_run(first, rng)
            lost += sum("lost" in problem for problem in problems)
            different += sum("lost" not in problem for problem in problems)
            for problem in problems[:5]:
                print(f"{scenario.name}, killed at call {first}: {problem}", file=sys.stderr)
            kills += n
            if kills >= count or lost + different > 20:
                break
    print(f"{kills:,} kills: {lost} checkpoints lost, {different} differences")
    return int(bool(lost or different))


class Scenario:
    """An uninterrupted run, and the same run killed again and again."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        whole = self.request(f"{name} whole")
        self.best: list[str] = []  # digests of the best weights, in order
        self.rollbacks: dict[int, int] = {}  # from a step to an earlier one

        def run_alone(report_line: Any) -> None:
            counter = CallCounter()
            with intercept_calls(counter):
                for report in tiny.run_session(whole):
                    if (tiny.promise_of(report) or "").endswith("best"):
                        report_line(f"best {tiny.digest(_weights(whole.out))}")
                    elif isinstance(report, RollbackReport):
                        report_line(f"back {report.from_step} {report.step}")
            report_line(f"calls {len(counter.names)}")

        for what, *values in map(str.split, tiny.run_forked(run_alone).lines):
            if what == "best":
                self.best.append(values[0])
            elif what == "back":
                self.rollbacks[int(values[0])] = int(values[1])
            else:
                self.n_calls = int(values[0])
        self.whole = tiny.fingerprint(whole.out)
        assert bool(self.rollbacks) == ("patience" in SCENARIOS[name])

    def request(self, out: str) -> RunRequest:
        """Request the run in a directory of this name."""
        settings = SCENARIOS[self.name]
        if "lora" in settings:
            return tiny.lora_request(self.folder, self.folder / out, **settings)
        return tiny.request(self.folder, self.folder / out, **settings)

    def kill_run(self, first: int, rng: random.Random) -> tuple[int, list[str]]:
        """Kill a run several times, first at call `first`; return the kills and the problems."""
        request = self.request("killed")
        shutil.rmtree(request.out, ignore_errors=True)
        kills = [first, *(rng.randrange(1, self.n_calls // 4) for _ in range(5)), 0]
        newest, n_best = -1, 0  # as reported
        for n, at in enumerate(kills):
            killer = Killer(at, torn=rng.random() < 0.5)
            result = tiny.run_forked(partial(_run_session, request, killer))
            for step, kind in map(str.split, result.lines):
                newest, n_best = int(step), n_best + (kind == "best")
            if not result.killed:
                break
            if lost := self._lost(request.out, newest, n_best):
                return n + 1, [lost]
        if result.status:
            return n, [f"exit status {result.status}"]
        return n, tiny.list_differences(tiny.fingerprint(request.out), self.whole)

    def _lost(self, out: Path, newest: int, n_best: int) -> str:
        """Return the reported state or weights that are not on disk; empty: none."""
        if newest < 0:
            return ""
        saved = tiny.load_newest_state(out)
        if saved is None or saved.damaged:
            return f"lost: no intact state, {newest} was reported"
        if saved.progress["step"] < self.rollbacks.get(newest, newest):
            return f"lost: state {saved.progress['step']}, {newest} was reported"
        if n_best:
            model_with_adapter.load(out)
            if tiny.digest(_weights(out)) not in self.best[n_best - 1 :]:
                return f"lost: best weights number {n_best}"
        return ""


def _weights(out: Path) -> Path:
    return out / (ADAPTER_WEIGHTS if is_adapter(out) else model_files.WEIGHTS)


def _run_session(request: RunRequest, killer: Killer, report_line: Any) -> None:
    with intercept_calls(killer):
        for report in tiny.run_session(request):
            if promise := tiny.promise_of(report):
                report_line(promise)
    leftovers = tiny.leftovers(request.out)
    assert not leftovers, leftovers


if __name__ == "__main__":
    sys.exit(main())
