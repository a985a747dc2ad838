"""Two processes of one thread against one of two: speed, the same losses, the end after a kill.

    python benchmarks/scaling/ranks.py CORPUS [--size tiny] [--rounds 3] [--out FILE]

The same 50 steps as one process with batches of 16, and with torchrun as two ranks with batches of
8 each, by DDP and by FSDP, over gloo, in turns. Tokens a second are the median step's after the
fifth, and of the rounds the median. Then rank 1 is killed in a step, and the clock runs until all
have ended; what is resumed from there on one process must come to the same losses.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import record

STEPS, BATCH, KILLED_AT = 50, 16, 25
WAYS = ("one", "ddp", "fsdp")


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        for _ in range(options.rounds):
            for way in WAYS:
                steps = run(options, folder / way, way)
                speeds[way].append(statistics.median(s["tokens_per_second"] for s in steps[5:]))
        medians = {way: statistics.median(values) for way, values in speeds.items()}
        found: dict[str, Any] = {"tokens_per_second": speeds, "median": medians}
        for way in WAYS[1:]:
            found[way] = {
                "of_one_process": medians[way] / medians["one"],
                "largest_difference": difference(folder / way, folder / "one"),
                **killed(options, folder / f"{way}-killed", way, folder / "one"),
            }
            print(way, json.dumps(found[way]))
    finally:
        shutil.rmtree(folder)
    print(json.dumps(medians))
    if options.out:
        record.write(options.out, record.origin() | {"size": options.size} | found)


def command(options: argparse.Namespace, out: Path, way: str) -> list[str]:
    """The run, in one process or two."""
    alone = way == "one"
    launcher = (
        [] if alone else ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    )
    batch, threads = (BATCH, 2) if alone else (BATCH // 2, 1)
    given = [f"--set=batch_size={batch}", "--set=eval_every=25", "--set=eval_tokens=4096"]
    shared = [] if alone else ["--parallel", way]
    train = ["tgen", "train", str(options.corpus), "-o", str(out), "--size", options.size]
    rest = ["--steps", str(STEPS), "--threads", str(threads), "-q", "--json", "--overwrite"]
    return [sys.executable, "-m", *launcher, *train, *rest, *shared, *given]


def run(options: argparse.Namespace, out: Path, way: str) -> list[dict[str, Any]]:
    """Its steps."""
    done = subprocess.run(command(options, out, way), capture_output=True, check=True)
    return [r for r in map(json.loads, done.stdout.splitlines()) if r["kind"] == "StepReport"]


def losses(out: Path) -> dict[tuple[str, int], float]:
    """Of all steps and evaluations."""
    lines = map(json.loads, (out / "training" / "log.jsonl").read_text().splitlines())
    kinds = ("StepReport", "EvalReport")
    return {(r["kind"], r["step"]): r["loss"] for r in lines if r["kind"] in kinds}


def difference(out: Path, whole: Path) -> float:
    """The largest between two runs' losses, nats."""
    ours, theirs = losses(out), losses(whole)
    assert ours.keys() == theirs.keys()
    return max(abs(ours[key] - theirs[key]) for key in ours)


def killed(options: argparse.Namespace, out: Path, way: str, whole: Path) -> dict[str, float]:
    """Seconds from the death of rank 1 to the end of all, and what the resumed run comes to."""
    arguments = command(options, out, way)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout
    for line in process.stdout:
        said = json.loads(line)
        if said["kind"] == "StepReport" and said["step"] == KILLED_AT + 3:
            os.kill(rank_1(process.pid), signal.SIGKILL)
            break
    began = time.perf_counter()
    process.communicate()
    seconds = time.perf_counter() - began
    assert process.returncode
    resumed = [sys.executable, "-m", "tgen", "train", "--resume", "-o", str(out), "-q"]
    subprocess.run(resumed, check=True)
    return {"seconds_to_the_end": seconds, "difference_resumed": difference(out, whole)}


def rank_1(launcher: int) -> int:
    """The process that torchrun started second."""
    for task in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((task / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and b"\0RANK=1\0" in (task / "environ").read_bytes():
                return int(task.name)
        except OSError:  # it has ended meanwhile
            continue
    raise RuntimeError("there is no rank 1")


if __name__ == "__main__":
    main()
