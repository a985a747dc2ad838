"""Does `tgen bench` tell a change from none? An engine against itself, and one that is slowed.

    python benchmarks/honesty/bench.py

Twenty times `tgen bench -p 128 -n 64 -r 20 --against self`: how often the 99 % interval holds the
ratio 1. Then an engine each of whose passes is drawn out by a tenth, by waiting busily, and one
that is left as it is: in turns with the plain engine, and against a run that was made before. And
ten times a run is saved and compared with the next process, in which nothing has changed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import record
from tgen.benchmark.comparison import since
from tgen.benchmark.sweep import Setup, compare_arms, open_setups, sweep
from tgen.benchmark.throughput import EngineBackend, Workload
from tgen.checkpoint.model_lookup import find_model

_TESTS = [Workload(n_prompt=128), Workload(n_gen=64)]


class Slowed(EngineBackend):
    """An arm whose passes take longer by a share of their own time."""

    def __init__(self, arm: EngineBackend, share: float) -> None:
        self.__dict__ |= arm.__dict__
        self.share = share

    def prompt(self, test: Workload) -> None:
        """And a wait."""
        begin = time.perf_counter()
        super().prompt(test)
        self._wait(begin)

    def step(self) -> None:
        """And a wait."""
        begin = time.perf_counter()
        super().step()
        self._wait(begin)

    def _wait(self, begin: float) -> None:
        until = begin + (time.perf_counter() - begin) * (1 + self.share)
        while time.perf_counter() < until:
            pass


def against_self(runs: int, trials: int) -> dict[str, list[list[float]]]:
    """The intervals of the command, by test."""
    command = [sys.executable, "-m", "tgen", "bench", "-p", "128", "-n", "64", "-r", str(trials)]
    found: dict[str, list[list[float]]] = {}
    for _ in range(runs):
        done = subprocess.run(
            [*command, "--against", "self", "--json", "-q"], capture_output=True, check=True
        )
        for one in json.loads(done.stdout)["differences"]:
            ends = [one["ratio"]["low"], one["ratio"]["high"]]
            found.setdefault(one["label"], []).append(ends)
            print(one["label"], *(f"{end:.3f}" for end in ends), flush=True)
    return found


def processes(runs: int, trials: int) -> list[dict[str, object]]:
    """What is said of an engine that has not changed, in one process and the next."""
    command = [sys.executable, "-m", "tgen", "bench", "-p", "128", "-n", "64", "-r", str(trials)]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "then.json"))
        for _ in range(runs):
            subprocess.run([*command, "--save", path, "-q"], capture_output=True, check=True)
            again = [*command, "--compare", path, "--json", "-q"]
            done = subprocess.run(again, capture_output=True, check=True)
            rows += json.loads(done.stdout)["differences"]
    return rows


def slowed(setup: Setup, share: float, trials: int) -> list[dict[str, object]]:
    """What is said of an engine that is slowed by a share: in turns, and since a run before."""
    slow = replace(setup, arm=Slowed(setup.arm, share))
    rows: list[dict[str, object]] = []
    for *_, found in compare_arms(slow, setup.arm, "plain", _TESTS, trials=trials)[1]:
        rows.append({"slowed_by": share, "how": "in turns"} | asdict(found))
    before = [report for _, report in sweep([setup], _TESTS, trials=trials)]
    for (_, report), old in zip(sweep([slow], _TESTS, trials=trials), before, strict=True):
        then = {"samples_ns": old.seconds.seconds, "yardstick_ns": old.yards}
        found = since(report, {name: [1e9 * s for s in of] for name, of in then.items()})
        rows.append({"slowed_by": share, "how": "since"} | asdict(found))
    return rows


def main() -> None:
    """Runs all, and prints what was said."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "honesty.json")
    options = parser.parse_args()
    intervals = against_self(options.runs, options.trials)
    unchanged = processes(options.runs // 2, options.trials)
    (setup,) = open_setups(find_model(None).path, seed=1337)
    rows = [r for share in (0.1, 0.0) for r in slowed(setup, share, options.trials)]
    for label, ends in intervals.items():
        held = sum(low <= 1 <= high for low, high in ends)
        print(f"{label}: the interval holds 1 in {held} of {len(ends)}")
    said = sum(bool(row["verdict"]) for row in unchanged)
    print(f"one process after another: a difference is said {said} times of {len(unchanged)}")
    for row in rows:
        ratio = row["ratio"]
        assert isinstance(ratio, dict)
        ends = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        print(row["slowed_by"], row["how"], row["label"], ends, row["verdict"] or "no difference")
    record.write(
        options.out,
        record.origin() | {"against_self": intervals, "processes": unchanged, "slowed": rows},
    )


if __name__ == "__main__":
    main()
