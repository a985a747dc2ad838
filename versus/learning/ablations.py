"""Ablate the default settings: the same text and time, one setting changed at a time.

    python -m versus.learning.ablations CORPUS [--minutes 2] [--seeds 2]

Each run is a `tgen train` process with one CPU thread; as many run in parallel as there are CPUs.
The result is the best validation loss in bits per byte.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from versus import harness

BASELINE = "defaults"
# Changes to the plan: options of `tgen train`, or fields for --set.
VARIANTS: dict[str, dict[str, str]] = {
    BASELINE: {},
    "nano": {"size": "nano"},
    "micro": {"size": "micro"},
    "tiny": {"size": "tiny"},
    "small": {"size": "small"},
    "AdamW only, 3e-3": {"optimizer": "adamw", "learning_rate": "0.003"},
    "Muon 0.01": {"matrix_learning_rate": "0.01"},
    "Muon 0.06": {"matrix_learning_rate": "0.06"},
    "AdamW 2e-3": {"learning_rate": "0.002"},
    "no q/k norm (llama)": {"family": "llama"},
    "gpt2": {"family": "gpt2"},
    "classic": {"family": "classic"},
    "tied embeddings": {"tied_embeddings": "true"},
    "random start": {"bigram_start": "false"},
    "queries, keys and values together": {"separate_qkv": "false"},
    "products in float32": {"precision": "float32"},
    "decay fraction 0.5": {"decay_fraction": "0.5"},
    "decay fraction 0.15": {"decay_fraction": "0.15"},
    "batch size 8": {"batch_size": "8"},
    "batch size 32": {"batch_size": "32"},
    "characters": {"tokenizer": "char"},
    "BPE 512": {"vocab-size": "512"},
    "BPE 1024": {"vocab-size": "1024"},
    "BPE 4096": {"vocab-size": "4096"},
    "dropout 0.1": {"dropout": "0.1"},
    "no BPE-dropout": {"bpe_dropout": "0"},
    "BPE-dropout 0.2": {"bpe_dropout": "0.2"},
}
OPTIONS = ("size", "family", "tokenizer", "vocab-size")


def train_arguments(
    options: argparse.Namespace, out: Path, seed: int, settings: dict[str, str]
) -> list[str]:
    """Return the arguments of `tgen` for one run."""
    arguments = ["train", str(options.corpus), "--out", str(out)]
    arguments += ["--minutes", str(options.minutes), "--seed", str(seed), "--threads", "1", "-q"]
    for name, value in settings.items():
        arguments += [f"--{name}", value] if name in OPTIONS else ["--set", f"{name}={value}"]
    return [*arguments, "--json"]


def train(options: argparse.Namespace, name: str, seed: int) -> dict[str, object]:
    """Train one variant and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = train_arguments(options, Path(folder) / "model", seed, VARIANTS[name])
        command = [sys.executable, "-m", "tgen", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        output = harness.run_process(command, env=environment)
    reports = [json.loads(line) for line in output.splitlines()]
    plan = next(r for r in reports if r["kind"] == "PlanReport")
    end = reports[-1]
    print(f"{name}, seed {seed}: {end['best_bits_per_byte']:.4f}", file=sys.stderr, flush=True)
    return {
        "variant": name,
        "set": VARIANTS[name],
        "seed": seed,
        "size": plan["size"],
        "parameters": plan["n_parameters"],
        "steps": end["step"],
        "tokens": end["tokens"],
        "seconds": end["seconds"],
        "bits_per_byte": end["best_bits_per_byte"],
    }


def measure(options: argparse.Namespace) -> None:
    """Train all variants with all seeds, print the table and write the results."""
    jobs = [(name, seed) for seed in range(1, options.seeds + 1) for name in options.only]
    with ThreadPoolExecutor(options.parallel) as pool:
        runs = list(pool.map(lambda job: train(options, *job), jobs))
    summary = {
        name: statistics.fmean(float(str(r["bits_per_byte"])) for r in runs if r["variant"] == name)
        for name in options.only
    }
    first = summary[options.only[0]]
    rows = [["", "bits per byte", "difference"]]
    rows += [[name, f"{bits:.4f}", f"{bits - first:+.4f}"] for name, bits in summary.items()]
    print(harness.format_table(rows))
    harness.save(options, {"runs": runs, "summary": summary})


def measure_quick(options: argparse.Namespace) -> None:
    """Plan a run with all changes at once, which checks their names and values; train two."""
    from tgen.cli.app import run

    with tempfile.TemporaryDirectory() as folder:
        options.corpus = harness.write_text(Path(folder, "corpus.txt"), 20_000)
        settings = {name: value for change in VARIANTS.values() for name, value in change.items()}
        settings["tokenizer"] = "bpe"  # characters have no vocabulary size
        if run([*train_arguments(options, Path(folder, "model"), 1, settings), "--dry-run"]):
            raise SystemExit("error: a variant is invalid")
        measure(options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "ablations.json")
    parser.add_argument("corpus", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    quick = {"minutes": 0.01, "seeds": 1, "only": [BASELINE, "batch size 8"]}
    options = harness.parse(parser, arguments, quick)
    if options.corpus is None and not options.quick:
        parser.error("the argument CORPUS is required without --quick")
    harness.run(measure_quick if options.quick else measure, options)


if __name__ == "__main__":
    main()
