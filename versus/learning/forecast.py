"""Check the forecast at the end of a run: train, read it, continue to twice the steps, compare.

    python -m versus.learning.forecast TEXT... [--runs 30]

The runs alternate between the texts; excerpt, size, family, steps, batch and seed are random, but
the same at each call. Each run is two `tgen train` processes with one CPU thread.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from versus import harness


def choose_settings(number: int, steps: Sequence[int]) -> dict[str, Any]:
    """Return the random settings of a run."""
    chance = random.Random(number)
    n_steps = chance.choice(steps)
    return {
        "seed": chance.randrange(1000),
        "bytes": chance.choice([100_000, 200_000, 300_000, 500_000]),
        "size": chance.choice(["nano"] * 4 + ["micro"]),
        "family": chance.choice(["qwen3"] * 6 + ["llama", "gpt2"]),
        "steps": n_steps,
        "batch_size": chance.choice([8, 8, 8, 16]),
        "eval_every": max(1, n_steps // chance.choice([8, 10, 14])),
    }


def train(arguments: Sequence[str]) -> dict[str, Any]:
    """Run `tgen train` and return its last report."""
    command = [sys.executable, "-m", "tgen", "train", *arguments, "--threads", "1", "-q", "--json"]
    output = harness.run_process(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


def check(text: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train on an excerpt of a text, continue to twice the steps, and return both results."""
    with tempfile.TemporaryDirectory() as folder:
        corpus, out = Path(folder, "corpus.txt"), Path(folder, "model")
        data = text.read_bytes()
        start = random.Random(settings["seed"]).randrange(max(1, len(data) - settings["bytes"]))
        corpus.write_bytes(data[start : start + settings["bytes"]])
        arguments = [str(corpus), "--out", str(out)]
        for name in ("seed", "size", "family", "steps"):
            arguments += [f"--{name}", str(settings[name])]
        for name in ("batch_size", "eval_every"):
            arguments += ["--set", f"{name}={settings[name]}"]
        done = train(arguments)
        end = str(2 * settings["steps"])
        longer = train(["--resume", "--override", "--steps", end, "--out", str(out)])
    forecast, reached = done["forecast"], longer["best_bits_per_byte"]
    difference = forecast and abs(forecast["bits_per_byte"] - reached)
    return settings | {
        "text": text.name,
        "bits_per_byte": done["best_bits_per_byte"],
        "forecast": forecast,
        "reached": reached,
        "within": forecast and difference <= forecast["error"],
    }


def measure(options: argparse.Namespace) -> None:
    """Check all runs, print the table and write the results."""
    runs = []
    for number in range(options.runs):
        text = options.texts[number % len(options.texts)]
        runs.append(check(text, choose_settings(number, options.steps)))
        print(f"{number + 1} of {options.runs}", file=sys.stderr, flush=True)
    table = [["text", "model", "steps", "bits per byte", "forecast", "twice the steps", "within"]]
    for run in runs:
        expected = "none"
        if (forecast := run["forecast"]) is not None:
            expected = f"{forecast['bits_per_byte']:.3f} ±{forecast['error']:.3f}"
        model = f"{run['family']}, {run['size']}"
        cells = [f"{run['bits_per_byte']:.3f}", expected, f"{run['reached']:.3f}"]
        table.append([run["text"], model, str(run["steps"]), *cells, str(run["within"])])
    print(harness.format_table(table))
    forecasts = [run["within"] for run in runs if run["forecast"] is not None]
    print(f"{sum(forecasts)} of {len(forecasts)} within the interval")
    harness.save(options, {"runs": runs})


def measure_quick(options: argparse.Namespace) -> None:
    """Check one run on generated text."""
    with tempfile.TemporaryDirectory() as folder:
        options.texts = [harness.write_text(Path(folder, "text.txt"), 20_000)]
        measure(options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "forecast.json")
    parser.add_argument("texts", type=Path, nargs="*")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--steps", type=int, nargs="+", default=[120, 160, 220])
    options = harness.parse(parser, arguments, {"runs": 1, "steps": [2]})
    if not options.texts and not options.quick:
        parser.error("the argument TEXT is required without --quick")
    harness.run(measure_quick if options.quick else measure, options)


if __name__ == "__main__":
    main()
