"""Compare two ranks of one thread with one process of two threads: speed, losses, recovery.

    python -m versus.scaling.ranks CORPUS [--size tiny] [--rounds 3]

The same steps run as one process, and with torchrun as two ranks with half the batch each, by DDP
and by FSDP, over gloo, interleaved. Tokens per second are the median step's after the warm-up, and
the median of the rounds. Then rank 1 is killed during a step, and the time until all processes have
exited is measured; the run is resumed as one process and must reach the same losses. Linux only.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from versus import harness

SINGLE = "one process"


def train_command(options: argparse.Namespace, out: Path, mode: str) -> list[str]:
    """Return the command of a run, as one process or as several ranks."""
    single = mode == SINGLE
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}", "-m"]
    batch, threads = (
        (options.batch, options.threads) if single else (options.batch // options.ranks, 1)
    )
    command = [sys.executable, "-m", *([] if single else launcher)]
    command += ["tgen", "train", str(options.corpus), "-o", str(out), "--size", options.size]
    command += ["--steps", str(options.steps), "--threads", str(threads), "-q", "--json"]
    command += ["--overwrite", *([] if single or options.ranks == 1 else ["--parallel", mode])]
    settings = {"batch_size": batch, "eval_every": options.steps // 2, "eval_tokens": 4096}
    settings |= {"precision": "float32"}  # rounding to bfloat16 enlarges differences
    return [*command, *(f"--set={name}={value}" for name, value in settings.items())]


def train(options: argparse.Namespace, out: Path, mode: str) -> list[dict[str, Any]]:
    """Return the reports of the steps of a run."""
    command = train_command(options, out, mode)
    lines = harness.run_process(command).splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "StepReport"]


def read_losses(out: Path) -> dict[tuple[str, int], float]:
    """Return the losses of all steps and evaluations."""
    lines = map(json.loads, (out / "training" / "log.jsonl").read_text().splitlines())
    kinds = ("StepReport", "EvalReport")
    return {(r["kind"], r["step"]): r["loss"] for r in lines if r["kind"] in kinds}


def max_loss_difference(out: Path, reference: Path) -> float:
    """Return the largest difference between two runs' losses, in nats."""
    ours, theirs = read_losses(out), read_losses(reference)
    assert ours.keys() == theirs.keys()
    return max(abs(ours[key] - theirs[key]) for key in ours)


def kill_and_resume(
    options: argparse.Namespace, out: Path, mode: str, reference: Path
) -> dict[str, float]:
    """Kill the last rank in the middle; return the seconds to the end and the loss difference."""
    process = subprocess.Popen(
        train_command(options, out, mode), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    for line in process.stdout:
        report = json.loads(line)
        if report["kind"] == "StepReport" and report["step"] == options.steps // 2 + 2:
            os.kill(find_rank(process.pid, options.ranks - 1), signal.SIGKILL)
            break
    start = time.perf_counter()
    process.communicate()
    seconds = time.perf_counter() - start
    assert process.returncode
    resume = [sys.executable, "-m", "tgen", "train", "--resume", "-o", str(out), "-q"]
    resume += ["--threads", str(options.threads)]
    harness.run_process(resume)
    return {
        "seconds_until_exit": seconds,
        "resumed_max_loss_difference": max_loss_difference(out, reference),
    }


def find_rank(launcher: int, rank: int) -> int:
    """Return the process id of a rank that torchrun has started."""
    variable = f"\0RANK={rank}\0".encode()
    for task in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((task / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and variable in (task / "environ").read_bytes():
                return int(task.name)
        except OSError:  # the process has exited
            continue
    raise RuntimeError(f"rank {rank} was not found")


def measure(options: argparse.Namespace) -> None:
    """Measure, print the results and write them."""
    folder = Path(tempfile.mkdtemp())
    if options.corpus is None:
        options.corpus = harness.write_text(folder / "corpus.txt", 50_000)
    modes = [SINGLE, *options.modes]
    speeds: dict[str, list[float]] = {mode: [] for mode in modes}
    results: dict[str, Any] = {}
    try:
        for _ in range(options.rounds):
            for mode in modes:
                steps = train(options, folder / mode, mode)[options.warmup :]
                speeds[mode].append(statistics.median(s["tokens_per_second"] for s in steps))
        medians = {mode: statistics.median(values) for mode, values in speeds.items()}
        single = folder / SINGLE
        for mode in options.modes:
            results[mode] = {
                "speed_relative_to_one_process": medians[mode] / medians[SINGLE],
                "max_loss_difference": max_loss_difference(folder / mode, single),
            }
        for mode in options.kill_modes:
            killed = kill_and_resume(options, folder / f"{mode}-killed", mode, single)
            results[mode] = results.get(mode, {}) | killed
    finally:
        shutil.rmtree(folder)
    rows = [["", "result", "value"]]
    rows += [[mode, "tokens/s", f"{speed:,.0f}"] for mode, speed in medians.items()]
    for mode, values in results.items():
        rows += [[mode, name.replace("_", " "), f"{v:.3g}"] for name, v in values.items()]
    print(harness.format_table(rows))
    harness.save(
        options,
        {"size": options.size, "tokens_per_second": speeds, "median": medians} | results,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "ranks.json")
    parser.add_argument("corpus", type=Path, nargs="?")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    modes = ["ddp", "fsdp"]
    parser.set_defaults(modes=modes, kill_modes=modes, ranks=2)
    parser.set_defaults(steps=50, batch=16, warmup=5, threads=2)
    # Only one launch, of a single rank, which is killed.
    quick = {"size": "nano", "rounds": 1, "modes": [], "kill_modes": ["ddp"], "ranks": 1}
    quick |= {"steps": 8, "batch": 2, "warmup": 1, "threads": 1}
    options = harness.parse(parser, arguments, quick)
    if options.corpus is None and not options.quick:
        parser.error("the argument CORPUS is required without --quick")
    if not sys.platform.startswith("linux"):
        harness.skip("ranks", "needs Linux")
        return
    harness.run(measure, options)


if __name__ == "__main__":
    main()
