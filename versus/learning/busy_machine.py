"""Speed of `tgen train` while another process keeps one CPU busy, relative to an idle machine.

    python -m versus.learning.busy_machine

Every round trains the same model four times: idle and busy, with torch's threads as tgen sets them
and as they are without `tgen.machine.openmp_wait`. A run is stopped after some seconds; its speed
is that of all steps until then.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tgen.errors import TgenError
from versus import harness

_TGEN = "from tgen.cli import app; app.main()"
_SPINNING = f"from tgen.machine import device; device.watch_load = lambda n: None; {_TGEN}"
_WAYS = {"tgen": _TGEN, "spinning": _SPINNING}


@contextlib.contextmanager
def busy_cpu(wanted: bool) -> Iterator[None]:
    """Keep one CPU busy with another process if `wanted`."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def train(code: str, busy: bool, text: Path, folder: Path, options: argparse.Namespace) -> float:
    """Return the tokens per second of a run that is stopped after some seconds of steps.

    With `busy`, one CPU is busy from the plan on.
    """
    command = [sys.executable, "-c", code, "train", str(text), "--out", str(folder), "--overwrite"]
    command += ["--size", options.size, "--steps", str(options.steps), "--device", "cpu", "--json"]
    points: list[tuple[float, int]] = []
    step_tokens = 0
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        assert process.stdout is not None
        for line in process.stdout:
            report = json.loads(line)
            if report["kind"] == "PlanReport":
                step_tokens = report["batch_size"] * report["context_length"]
                stack.enter_context(busy_cpu(busy))
            elif report["kind"] == "StepReport":
                points.append((time.perf_counter(), report["step"]))
                if points[-1][0] - points[0][0] > options.seconds:
                    break
        process.kill()
    if len(points) < 2:
        raise TgenError("the run ended before its second step", "run the command to see why")
    (start, first), (end, last) = points[0], points[-1]
    return (last - first) * step_tokens / (end - start)


def measure(options: argparse.Namespace) -> None:
    """Run all rounds, print the table and write the result file."""
    rates: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        text = harness.write_text(Path(name) / "text.txt", 1500 * options.steps)
        for _ in range(options.rounds):
            for way in options.ways:
                for load in options.loads:
                    rate = train(_WAYS[way], load, text, Path(name) / "model", options)
                    rates.setdefault((way, load), []).append(rate)
                    print(f"{way}, {'one CPU busy' if load else 'idle'}: {rate:,.0f}", flush=True)
    rows = [["tokens/s, median", "idle", "one CPU busy", "busy / idle"]]
    content = {}
    for way in options.ways:
        measured = [rates[way, options.loads[i]] for i in (0, -1)]
        idle, busy = map(statistics.median, measured)
        content[way] = {"idle": measured[0], "busy": measured[1], "busy_to_idle": busy / idle}
        rows.append([way, f"{idle:,.0f}", f"{busy:,.0f}", f"{busy / idle:.2f}"])
    print(harness.format_table(rows))
    harness.save(options, {"size": options.size, "rates": content})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = harness.make_parser(__doc__ or "", "busy_machine.json")
    parser.add_argument("--size", default="micro", help="model size (default: micro)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS), help="all")
    parser.add_argument("--steps", type=int, default=200, help="steps per run (default: 200)")
    parser.add_argument("--seconds", type=float, default=12, help="at most per run (default: 12)")
    parser.set_defaults(loads=(False, True))
    quick = {"rounds": 1, "steps": 4, "seconds": 0.5, "size": "nano", "ways": ["tgen"]}
    quick |= {"loads": (True,)}  # takes the place of both
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
