"""A run that stops at any step and goes on is the run that never stopped, whatever its settings.

    python tests/faults/resuming.py [--long | COUNT]

Settings are drawn: family, optimizer, parts that a batch is computed in, dropout, tokens taken
apart, schedule, patience, what is held out. A run that is left alone is compared with one that is
stopped several times at drawn steps, or left where it is as if it had been killed there.
"""

import itertools
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
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
    "bpe_dropout": [0, 0.3],
    "bpe_dropout_in_decay": ["false", "true"],
    "warmup_steps": [0, 2, 8],
    "decay_fraction": [0, 0.3, 0.9],
    "eval_every": [1, 2, 3, 7],
    "patience": [0, 1, 2, 5],
    "learning_rate": [2e-3, 10],  # of AdamW alone: it gets worse, and the run goes back
    "weight_decay": [0, 0.1],
    "grad_clip": [0.01, 1],
}
_STEPS = 9


def main() -> int:
    """Resumes until it was often enough."""
    wanted = tiny.count(__doc__, short=100, long=10_000)
    tiny.get_ready()
    n, n_runs, problems = 0, 0, []
    with tiny.scratch() as folder:
        while n < wanted:
            draws = random.Random(n_runs)
            settings = {name: draws.choice(values) for name, values in CHOICES.items()}
            kept = {
                "val_fraction": draws.choice((0.1, 0.1, 0)),
                "seed": draws.choice((0, 2**63 - 1)),
            }
            ended = tiny.forked(lambda say, d=draws, s=settings, k=kept: one(folder, s, k, d, say))
            n_runs += 1
            n += ended.said.count("resumed")
            found = [line for line in ended.said if line.startswith("different")]
            if ended.status:
                found.append("a traceback")
            for problem in found[:3]:
                print(f"{settings | kept}: {problem}", file=sys.stderr)
            problems += found
            if len(problems) > 50:
                break
    print(f"{n:,} resumes of {n_runs:,} runs: {len(problems)} differences")
    return int(bool(problems))


def one(
    folder: Path,
    settings: dict[str, Any],
    kept: dict[str, Any],
    draws: random.Random,
    say: Callable[[str], None],
) -> None:
    """A run with these settings without a break, and once more with breaks."""

    def request(name: str) -> RunRequest:
        shutil.rmtree(folder / name, ignore_errors=True)
        wanted = tiny.request(folder, folder / name, steps=_STEPS, batch_size=3, **settings)
        bpe = {"tokenizer": "bpe", "vocab_size": 280} if settings["bpe_dropout"] else {}
        return replace(wanted, train=replace(wanted.train, **kept), **bpe)

    whole, parts = request("whole"), request("parts")
    list(tiny.sitting(whole))
    for _ in itertools.count():
        n_left = draws.randrange(1, 5)  # reports with a step until the break
        killed = draws.random() < 0.5
        last = None
        left = [n_left]
        reports = tiny.sitting(parts, stopped=lambda left=left, k=killed: left[0] <= 0 and not k)
        for last in reports:
            left[0] -= type(last).__name__ == "StepReport"
            if killed and left[0] <= 0:
                break
        reports.close()  # type: ignore[attr-defined]
        if getattr(last, "finished", False):
            break
        say("resumed")
    for difference in tiny.differences(tiny.kept(parts.out), tiny.kept(whole.out)):
        say(f"different: {difference}")


if __name__ == "__main__":
    sys.exit(main())
