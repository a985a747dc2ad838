"""Test the confidence intervals of `tgen bench`: how often does it report a wrong difference?

    python -m versus.bench.interval_coverage

1. `tgen bench --against self`, repeatedly: how often does the 99% interval contain the ratio 1?
2. A run is saved and compared with the next process, in which nothing has changed.
3. An engine whose passes are slowed by 10% with a busy wait, and an unchanged one: interleaved with
   the plain engine, and compared with an earlier run.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tgen.benchmark.backend import EngineBackend
from tgen.benchmark.comparison import compare_with_saved
from tgen.benchmark.sweep import Setup, compare_backends, open_setups, sweep
from tgen.benchmark.workload import Workload
from tgen.checkpoint.model_lookup import find_model
from versus import harness


class SlowedBackend(EngineBackend):
    """A backend whose passes take longer by a fraction of their own time."""

    def __init__(self, backend: EngineBackend, fraction: float) -> None:
        self.__dict__ |= backend.__dict__
        self.fraction = fraction

    def extend(self, n: int) -> None:
        """Take longer by the fraction."""
        start = time.perf_counter()
        super().extend(n)
        end = start + (time.perf_counter() - start) * (1 + self.fraction)
        while time.perf_counter() < end:
            pass


def run_bench(options: argparse.Namespace, *arguments: str) -> bytes:
    """Return the output of a `tgen bench` process."""
    command = [sys.executable, "-m", "tgen", "bench", "-p", str(options.prompt)]
    command += ["-n", str(options.gen), "-r", str(options.trials), "--no-limits", "--quiet"]
    if options.threads:
        command += ["--threads", str(options.threads)]
    return harness.run_process([*command, *arguments])


def compare_with_itself(options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Return the intervals of `--against self` by workload."""
    intervals: dict[str, list[list[float]]] = {}
    for _ in range(options.runs):
        for one in json.loads(run_bench(options, "--against", "self", "--json"))["differences"]:
            ends = [one["ratio"]["low"], one["ratio"]["high"]]
            intervals.setdefault(one["label"], []).append(ends)
    return intervals


def compare_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the differences between two processes without a change."""
    differences: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "saved.json"))
        for _ in range(max(1, options.runs // 2)):
            run_bench(options, "--save", path)
            differences += json.loads(run_bench(options, "--compare", path, "--json"))[
                "differences"
            ]
    return differences


def compare_slowed(
    setup: Setup, fraction: float, workloads: Sequence[Workload], trials: int
) -> list[dict[str, Any]]:
    """Return the differences of a slowed engine, interleaved and with an earlier run."""
    slowed = replace(setup, backend=SlowedBackend(setup.backend, fraction))
    rows: list[dict[str, Any]] = []
    _, results = compare_backends(slowed, setup.backend, "plain", workloads, trials=trials)
    for *_, difference in results:
        rows.append({"slowed_by": fraction, "method": "interleaved"} | asdict(difference))
    before = [report for _, report in sweep([setup], workloads, trials=trials)]
    for (_, report), old in zip(sweep([slowed], workloads, trials=trials), before, strict=True):
        saved = {
            "samples_ns": [1e9 * s for s in old.seconds.seconds],
            "probe_ns": [1e9 * s for s in old.probe_seconds],
        }
        difference = compare_with_saved(report, saved)
        rows.append({"slowed_by": fraction, "method": "earlier run"} | asdict(difference))
    return rows


def measure(options: argparse.Namespace) -> None:
    """Measure, print the results and write them."""
    intervals = compare_with_itself(options)
    unchanged = compare_processes(options)
    (setup,) = open_setups(
        find_model(None).path, threads=[options.threads], seed=1337, measure_peaks=False
    )
    workloads = [Workload(n_prompt=options.prompt), Workload(n_gen=options.gen)]
    rows = [
        row
        for fraction in (0.1, 0.0)
        for row in compare_slowed(setup, fraction, workloads, options.trials)
    ]
    for label, ends in intervals.items():
        n_covered = sum(low <= 1 <= high for low, high in ends)
        print(f"{label}: the 99% interval contains 1 in {n_covered} of {len(ends)} runs")
    n_significant = sum(bool(row["verdict"]) for row in unchanged)
    print(f"unchanged engine, next process: {n_significant} of {len(unchanged)} significant")
    table = [["slowed by", "method", "workload", "99% CI", "verdict"]]
    for row in rows:
        interval = f"{row['ratio']['low']:.3f} – {row['ratio']['high']:.3f}"
        verdict = row["verdict"] or "not significant"
        table.append([f"{row['slowed_by']:.0%}", row["method"], row["label"], interval, verdict])
    print(harness.format_table(table))
    harness.save(options, {"against_self": intervals, "processes": unchanged, "slowed": rows})


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "interval_coverage.json")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--trials", type=int, default=20)
    parser.set_defaults(prompt=128, gen=64, threads=None)
    harness.run(
        measure,
        harness.parse(
            parser, arguments, {"runs": 1, "trials": 8, "prompt": 8, "gen": 2, "threads": 1}
        ),
    )


if __name__ == "__main__":
    main()
