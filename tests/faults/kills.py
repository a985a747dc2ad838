"""SIGKILL at failpoints of training, then resume: nothing saved is lost, no byte differs.

    python tests/faults/kills.py [--long | COUNT]

The process dies at its k-th system call that changes the disk: at every k once in the first
sitting, at random ones in the next. After each kill the newest state must be the last reported one
or a later one, and so must the best weights; in the end all must be as in the run that was left
alone.
"""

import itertools
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import tiny
from calls import Counting, Killing, watched
from tgen.checkpoint import model_dir
from tgen.reports import RollbackReport
from tgen.runs import RunRequest
from tgen.runs.storage import state

SCENARIOS: dict[str, dict[str, Any]] = {
    "improves": {},
    "goes back to its best": {  # never better after its first evaluation
        "patience": 2, "optimizer": "adamw", "learning_rate": 30, "warmup_steps": 0, "steps": 12
    },
}  # fmt: skip


def main() -> int:
    """Kills until enough have died."""
    wanted = tiny.count(__doc__, short=300, long=20_000)
    tiny.get_ready()
    kills, lost, different = 0, 0, 0
    with tiny.scratch() as folder:
        scenarios = [Scenario(folder, name) for name in SCENARIOS]
        draws = random.Random(0)
        for i in itertools.count():
            scenario = scenarios[i % len(scenarios)]
            # All calls in turn, but in no order: few kills come past the whole run too.
            first = i // len(scenarios) * 101 % scenario.n_calls + 1
            n, problems = scenario.killed(first, draws)
            lost += sum("lost" in problem for problem in problems)
            different += sum("lost" not in problem for problem in problems)
            for problem in problems[:5]:
                print(f"{scenario.name}, killed at call {first}: {problem}", file=sys.stderr)
            kills += n
            if kills >= wanted or lost + different > 20:
                break
    print(f"{kills:,} kills: {lost} checkpoints lost, {different} differences")
    return int(bool(lost or different))


class Scenario:
    """A run that is left alone, for comparison, and is then killed again and again."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        whole = self.request(f"{name} whole")
        self.best: list[str] = []  # digests of the weights, in the order they were the best
        self.goes_back: dict[int, int] = {}  # from a step to an earlier one

        def alone(say: Any) -> None:
            counting = Counting()
            with watched(counting):
                for report in tiny.sitting(whole):
                    if (tiny.said_of(report) or "").endswith("best"):
                        say(f"best {tiny.digest(whole.out / model_dir.WEIGHTS)}")
                    elif isinstance(report, RollbackReport):
                        say(f"back {report.from_step} {report.step}")
            say(f"calls {len(counting.names)}")

        for what, *values in map(str.split, tiny.forked(alone).said):
            if what == "best":
                self.best.append(values[0])
            elif what == "back":
                self.goes_back[int(values[0])] = int(values[1])
            else:
                self.n_calls = int(values[0])
        self.whole = tiny.kept(whole.out)
        assert bool(self.goes_back) == ("patience" in SCENARIOS[name])

    def request(self, out: str) -> RunRequest:
        """The run, in a directory of this name."""
        return tiny.request(self.folder, self.folder / out, **SCENARIOS[self.name])

    def killed(self, first: int, draws: random.Random) -> tuple[int, list[str]]:
        """A run that is killed some times, first at call `first`: how often, and what is wrong."""
        wanted = self.request("killed")
        shutil.rmtree(wanted.out, ignore_errors=True)
        kills = [first, *(draws.randrange(1, self.n_calls // 4) for _ in range(5)), 0]
        newest, n_best = -1, 0  # as it was reported
        for n, at in enumerate(kills):
            killing = Killing(at, torn=draws.random() < 0.5)
            ended = tiny.forked(lambda say, killing=killing: _sitting(wanted, killing, say))
            for step, kind in map(str.split, ended.said):
                newest, n_best = int(step), n_best + (kind == "best")
            if not ended.killed:
                break
            if lost := self._lost(wanted.out, newest, n_best):
                return n + 1, [lost]
        if ended.status:
            return n, [f"exit status {ended.status}"]
        return n, tiny.differences(tiny.kept(wanted.out), self.whole)

    def _lost(self, out: Path, newest: int, n_best: int) -> str:
        """What is on disk, less than was reported."""
        if newest < 0:
            return ""
        saved = state.load_state(out, run_id=state.load_run(out)[0]["run_id"])
        if saved is None or saved.damaged:
            return f"lost: no whole state, {newest} was reported"
        if saved.progress["step"] < self.goes_back.get(newest, newest):
            return f"lost: state {saved.progress['step']}, {newest} was reported"
        if n_best:
            model_dir.load(out)
            if tiny.digest(out / model_dir.WEIGHTS) not in self.best[n_best - 1 :]:
                return f"lost: best weights number {n_best}"
        return ""


def _sitting(wanted: RunRequest, killing: Killing, say: Any) -> None:
    with watched(killing):
        for report in tiny.sitting(wanted):
            if said := tiny.said_of(report):
                say(said)
    leftovers = tiny.leftovers(wanted.out)
    assert not leftovers, leftovers


if __name__ == "__main__":
    sys.exit(main())
