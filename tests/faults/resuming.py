"""A run that stops at any step and resumes equals the uninterrupted run, with any settings.

    python tests/faults/resuming.py [--long | COUNT]

Settings are random: family, optimizer, micro-batches, dropout, BPE-dropout, schedule, patience,
validation set. An uninterrupted run is compared with one that is stopped several times at random
steps, or abandoned there as if it had been killed.
"""

import itertools
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tiny
from tgen.config import FAMILIES
from tgen.runs import RunRequest

CHOICES: dict[str, list[Any]] = {
    "family": list(FAMILIES),
    "optimizer": ["muon", "adamw"],
    "accumulation": [1, 2, 3],
    "dropout": [0, 0.1, 0.5],
    "consistency": [0, 1.5],
    "bpe_dropout": [0, 0.3],
    "bpe_dropout_in_decay": ["false", "true"],
    "warmup_steps": [0, 2, 8],
    "decay_fraction": [0, 0.3, 0.9],
    "eval_every": [1, 2, 3, 7],
    "patience": [0, 1, 2, 5],
    "learning_rate": [2e-3, 10],  # with AdamW the loss rises, and the run restores its best state
    "weight_decay": [0, 0.1],
    "grad_clip": [0.01, 1],
}
_STEPS = 9


def main() -> int:
    """Resume runs until the count is reached."""
    count = tiny.count(__doc__, short=12, long=10_000)
    tiny.import_everything()
    n, n_runs, problems = 0, 0, []
    with tiny.scratch() as folder:
        while n < count:
            rng = random.Random(tiny.seed + n_runs)
            settings = {name: rng.choice(values) for name, values in CHOICES.items()}
            config = {
                "val_fraction": rng.choice((0.1, 0.1, 0)),
                "seed": rng.choice((0, 2**63 - 1)),
            }
            result = tiny.run_here(partial(compare_runs, folder, settings, config, rng))
            n_runs += 1
            n += result.lines.count("resumed")
            differences = [line for line in result.lines if line.startswith("different")]
            if result.status:
                differences.append("a traceback")
            for problem in differences[:3]:
                print(f"{settings | config}: {problem}", file=sys.stderr)
            problems += differences
            if len(problems) > 50:
                break
    print(f"{n:,} resumes of {n_runs:,} runs: {len(problems)} differences")
    return int(bool(problems))


def compare_runs(
    folder: Path,
    settings: dict[str, Any],
    config: dict[str, Any],
    rng: random.Random,
    report_line: Callable[[str], None],
) -> None:
    """Compare an uninterrupted run with these settings and an interrupted one."""

    def request(name: str) -> RunRequest:
        shutil.rmtree(folder / name, ignore_errors=True)
        run_request = tiny.request(folder, folder / name, steps=_STEPS, batch_size=3, **settings)
        bpe = {"tokenizer": "bpe", "vocab_size": 280} if settings["bpe_dropout"] else {}
        return replace(run_request, train=replace(run_request.train, **config), **bpe)

    whole, parts = request("whole"), request("parts")
    list(tiny.run_session(whole))
    for _ in itertools.count():
        n_left = rng.randrange(1, 5)  # steps until the interruption
        killed = rng.random() < 0.5
        last = None
        left = [n_left]
        reports = tiny.run_session(
            parts, stopped=lambda left=left, k=killed: left[0] <= 0 and not k
        )
        for last in reports:
            left[0] -= type(last).__name__ == "StepReport"
            if killed and left[0] <= 0:
                break
        reports.close()
        if getattr(last, "finished", False):
            break
        report_line("resumed")
    for difference in tiny.list_differences(
        tiny.fingerprint(parts.out), tiny.fingerprint(whole.out)
    ):
        report_line(f"different: {difference}")


if __name__ == "__main__":
    sys.exit(main())
