"""What each choice of the defaults is worth: the same text and time, one thing changed at a time.

    python benchmarks/learning/ablations.py CORPUS [--minutes 2] [--seeds 2] [--out FILE]

Every run is `tgen train` with one processor thread and one variant's fields set; as many go side by
side as there are cores. The figure is the best bits per byte of the held-out text.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import record

SHAPES = {
    "nano": {"size": "nano"},
    "micro": {"size": "micro"},
    "tiny": {"size": "tiny"},
    "small": {"size": "small"},
}
# What differs from the plan: options of their own, or fields for --set.
VARIANTS: dict[str, dict[str, str]] = {
    "the plan": {},
    **SHAPES,
    "AdamW alone, 3e-3": {"optimizer": "adamw", "learning_rate": "0.003"},
    "Muon 0.01": {"matrix_learning_rate": "0.01"},
    "Muon 0.06": {"matrix_learning_rate": "0.06"},
    "AdamW rate 2e-3": {"learning_rate": "0.002"},
    "no q/k norm (llama)": {"family": "llama"},
    "gpt2": {"family": "gpt2"},
    "classic": {"family": "classic"},
    "untied embeddings": {"tied_embeddings": "false"},
    "decay over 50 %": {"decay_fraction": "0.5"},
    "decay over 15 %": {"decay_fraction": "0.15"},
    "batch of 8": {"batch_size": "8"},
    "batch of 32": {"batch_size": "32"},
    "characters": {"tokenizer": "char"},
    "BPE 512": {"vocab-size": "512"},
    "BPE 2048": {"vocab-size": "2048"},
    "dropout 0.1": {"dropout": "0.1"},
    "tokens stay whole": {"token_split": "0"},
    "a fifth taken apart": {"token_split": "0.2"},
}
OPTIONS = ("size", "family", "tokenizer", "vocab-size")


def command(
    corpus: Path, out: Path, minutes: float, seed: int, fields: dict[str, str]
) -> list[str]:
    """The whole command line of one run."""
    words = [sys.executable, "-m", "tgen", "train", str(corpus), "--out", str(out)]
    words += ["--minutes", str(minutes), "--seed", str(seed), "--threads", "1", "-q", "--json"]
    for name, value in fields.items():
        words += [f"--{name}", value] if name in OPTIONS else ["--set", f"{name}={value}"]
    return words


def run(corpus: Path, minutes: float, seed: int, name: str) -> dict[str, object]:
    """Trains one variant; its figures."""
    with tempfile.TemporaryDirectory() as folder:
        words = command(corpus, Path(folder) / "model", minutes, seed, VARIANTS[name])
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        made = subprocess.run(words, capture_output=True, check=True, env=environment)
    reports = [json.loads(line) for line in made.stdout.splitlines()]
    plan = next(r for r in reports if r["kind"] == "PlanReport")
    done = reports[-1]
    print(f"{name}, seed {seed}: {done['best_bits_per_byte']:.4f}", file=sys.stderr, flush=True)
    return {
        "variant": name,
        "set": VARIANTS[name],
        "seed": seed,
        "size": plan["size"],
        "parameters": plan["n_parameters"],
        "steps": done["step"],
        "tokens": done["tokens"],
        "seconds": done["seconds"],
        "bits_per_byte": done["best_bits_per_byte"],
    }


def main() -> None:
    """Runs every variant with every seed and writes the table and the data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--side-by-side", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ablations.json"))
    asked = parser.parse_args()
    jobs = [(name, seed) for seed in range(1, asked.seeds + 1) for name in asked.only]
    with ThreadPoolExecutor(asked.side_by_side) as pool:
        runs = list(pool.map(lambda job: run(asked.corpus, asked.minutes, job[1], job[0]), jobs))
    summary = {
        name: statistics.fmean(r["bits_per_byte"] for r in runs if r["variant"] == name)
        for name in asked.only
    }
    for name, bits in summary.items():
        print(f"{name:24} {bits:.4f} {bits - summary[asked.only[0]]:+.4f}")
    record.write(asked.out, record.origin() | {"runs": runs, "summary": summary})


if __name__ == "__main__":
    main()
