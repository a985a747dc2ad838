"""Compare how well tgen and nanoGPT learn: the same text, CPU and scorer.

    git clone https://github.com/karpathy/nanoGPT
    python -m versus.learning.versus_nanogpt nanoGPT CORPUS --seeds 3 --long-minutes 30

nanoGPT's CPU recipe sets the time. tgen gets a sixth, a quarter and all of it, with no option but
--minutes, and --val-fraction to hold out the same text: nanoGPT counts characters, tgen bytes. The
sides are interleaved by seed. Whole processes are timed. The table goes to stdout, progress to
stderr, and the result file is rewritten after every run.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tgen
from tgen.checkpoint import model_dir
from tgen.errors import CorpusError, TrainingError
from tgen.model.transformer import Transformer
from versus import harness
from versus.learning import nanogpt
from versus.learning.scoring import Predictor, bits_per_byte

NANOGPT, LONG = "nanoGPT", "tgen, long"
FRACTIONS = {"tgen, 1/6": 1 / 6, "tgen, 1/4": 1 / 4, "tgen, 1/1": 1.0}  # of nanoGPT's time
_FIRST_SEED = 1337
_TRIAL_MINUTES, _MIN_MINUTES = 0.2, 0.02


@dataclass
class Benchmark:
    """The corpus, a working directory and the runs so far."""

    corpus: Path
    folder: Path
    text: bytes
    validation: bytes  # the end of `text`, which neither side trains on
    iterations: int
    train_arguments: Sequence[str] = ()  # more options of `tgen train`
    tolerance: float = 0.002  # bits per byte, between tgen's own loss and the scorer's
    overheads: list[float] = field(default_factory=list)  # seconds beyond --minutes, per run
    runs: list[dict[str, Any]] = field(default_factory=list)

    def run_nanogpt(self, seed: int) -> dict[str, Any]:
        """Train with nanoGPT's recipe."""
        _print_progress(f"seed {seed}: {NANOGPT}, {self.iterations} iterations")
        command = nanogpt.train_command(self.folder, seed, self.iterations)
        seconds, _ = _run_timed(command, self.folder)
        model, details = nanogpt.load(self.folder, seed)
        return self._add_run(NANOGPT, seed, seconds, model, details)

    def run_tgen(self, side: str, seed: int, seconds: float) -> dict[str, Any]:
        """Train with `tgen train` and the minutes that make the process last about `seconds`, or
        less: that other runs ended early gives it no more."""
        overhead = max(0.0, median(self.overheads[-3:])) if self.overheads else 0.0
        minutes = max(_MIN_MINUTES, (seconds - overhead) / 60)
        _print_progress(f"seed {seed}: {side}, {minutes:.2f} minutes")
        wall_seconds, reports = self._train(minutes, seed)
        plan, end = reports["PlanReport"], reports["DoneReport"]
        model = _load_tgen(self.folder / "model")
        bits = end["best_bits_per_byte"]
        if plan["device"] != "cpu":
            raise TrainingError(f"tgen trained on {plan['device']}", "hide the GPU")
        details = {
            "minutes": round(minutes, 4),
            "steps": end["step"],
            "best_step": end["best_step"],
            "n_parameters": plan["n_parameters"],
            "own_bits_per_byte": bits,
        }
        run = self._add_run(side, seed, wall_seconds, model, details)
        if abs(bits - run["bits_per_byte"]) > self.tolerance:
            scored = run["bits_per_byte"]
            raise AssertionError(f"tgen reports {bits} bits per byte, the scorer {scored}")
        return run

    def measure_overhead(self) -> None:
        """Measure a short run's seconds beyond its minutes: imports and the end."""
        _print_progress(f"a run of {_TRIAL_MINUTES} minutes, to measure the overhead")
        self._train(_TRIAL_MINUTES, _FIRST_SEED)

    def _train(self, minutes: float, seed: int) -> tuple[float, dict[str, Any]]:
        """Return the seconds of the process, and the last report of each kind."""
        out = self.folder / "model"
        command = [
            *(sys.executable, "-m", "tgen", "train", str(self.corpus), "--minutes", f"{minutes}"),
            *("--val-fraction", f"{len(self.validation) / len(self.text)}"),
            *("--seed", str(seed), "--out", str(out), "--overwrite", "--quiet", "--json"),
            *self.train_arguments,
        ]
        seconds, lines = _run_timed(command, self.folder)
        self.overheads.append(seconds - minutes * 60)
        return seconds, {report["kind"]: report for report in map(json.loads, lines)}

    def _add_run(
        self, side: str, seed: int, seconds: float, model: Predictor, details: Mapping[str, Any]
    ) -> dict[str, Any]:
        bits = bits_per_byte(model, self.text[: -len(self.validation)], self.validation)
        _print_progress(f"  {seconds:.1f} s, {bits:.4f} bits per byte")
        run = {"side": side, "seed": seed, "wall_seconds": round(seconds, 2), "bits_per_byte": bits}
        run |= {"context_length": model.context_length} | dict(details)
        self.runs.append(run)
        return run


def validation_text(data: bytes) -> bytes:
    """Return the end of the text that nanoGPT holds out.

    Raises CorpusError if the text is not UTF-8 or has several documents.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise CorpusError("the corpus is not UTF-8", "nanoGPT reads characters only") from None
    if "<|endoftext|>" in text:
        raise CorpusError("the corpus has several documents", "use a single document")
    return nanogpt.validation_text(text)


def summarize(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return medians over the seeds by side, relative to nanoGPT's run of the same seed."""
    theirs = {run["seed"]: run for run in runs if run["side"] == NANOGPT}
    summary: dict[str, dict[str, Any]] = {}
    for side in dict.fromkeys(run["side"] for run in runs):
        ours = [run for run in runs if run["side"] == side]
        pairs = [(run, theirs[run["seed"]]) for run in ours if theirs]
        bits = [run["bits_per_byte"] for run in ours]
        summary[side] = {
            "runs": len(ours),
            "wall_seconds": median(run["wall_seconds"] for run in ours),
            "bits_per_byte": median(bits),
            "bits_per_byte_range": [min(bits), max(bits)],
        }
        if pairs:
            time_ratios = [a["wall_seconds"] / b["wall_seconds"] for a, b in pairs]
            gains = [b["bits_per_byte"] - a["bits_per_byte"] for a, b in pairs]
            summary[side] |= {
                "time_ratio": median(time_ratios),
                "bits_per_byte_gain": median(gains),
                "n_as_good": sum(gain >= 0 for gain in gains),
            }
    return summary


def format_summary(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the summary as a table."""
    rows = [["", "runs", "seconds", "time ratio", "bits/byte", "range", "gain", "as good"]]
    for side, row in summary.items():
        low, high = row["bits_per_byte_range"]
        cells = [side, str(row["runs"]), f"{row['wall_seconds']:.1f}", ""]
        cells += [f"{row['bits_per_byte']:.4f}", f"{low:.4f}-{high:.4f}", "", ""]
        if "time_ratio" in row:
            cells[3] = f"{row['time_ratio']:.2f}"
            cells[6] = f"{row['bits_per_byte_gain']:+.4f}"
            cells[7] = f"{row['n_as_good']} of {row['runs']}"
        rows.append(cells)
    return harness.format_table(rows)


def _load_tgen(path: Path) -> Predictor:
    bundle = model_dir.load(path)

    def encode(data: bytes) -> NDArray[np.int64]:
        ids = bundle.tokenizer.encode_corpus(data)[0].astype(np.int64)
        assert bundle.tokenizer.decode(ids.tolist()) == data  # every byte is predicted
        return ids

    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    return Predictor(encode=encode, logits=model, context_length=bundle.config.context_length)


def _run_timed(command: list[str], folder: Path) -> tuple[float, list[str]]:
    """Return the seconds of a process and its output lines."""
    source = str(Path(tgen.__file__).parent.parent)  # this tgen, not an installed one
    paths = [source, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    start = time.perf_counter()
    output = harness.run_process(command, cwd=folder, env=environment)
    return time.perf_counter() - start, output.decode().splitlines()


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_all(benchmark: Benchmark, n_seeds: int, long_minutes: float) -> Iterator[None]:
    """Run all sides and seeds, interleaved; yield after every run."""
    benchmark.measure_overhead()
    for number in range(n_seeds):
        seed = _FIRST_SEED + number
        seconds = benchmark.run_nanogpt(seed)["wall_seconds"]
        yield
        left = (n_seeds - number) * (1 + sum(FRACTIONS.values())) * seconds - seconds
        _print_progress(f"about {left / 60 + long_minutes:.0f} minutes left")
        for side, fraction in FRACTIONS.items():
            benchmark.run_tgen(side, seed, seconds * fraction)
            yield
    if long_minutes > 0:
        benchmark.run_tgen(LONG, _FIRST_SEED, long_minutes * 60)
        yield


def run_tgen_only(benchmark: Benchmark) -> Iterator[None]:
    """Run tgen once, for as short a time as possible."""
    benchmark.run_tgen("tgen", _FIRST_SEED, 0.0)
    yield


def measure(options: argparse.Namespace) -> None:
    """Run everything, write the results after every run, and print the table."""
    with tempfile.TemporaryDirectory(prefix="versus-nanogpt-") as name:
        folder = Path(name)
        if options.corpus is None:
            options.corpus = harness.write_text(folder / "corpus.txt", 20_000)
        if not options.corpus.is_file():
            raise CorpusError(f"{str(options.corpus)!r} is not a file", "pass a UTF-8 text file")
        corpus = options.corpus.resolve()
        data = corpus.read_bytes()
        validation = validation_text(data)
        content: dict[str, Any] = {
            "corpus_sha256": hashlib.sha256(data).hexdigest(),
            "corpus_bytes": len(data),
            "validation_bytes": len(validation),
        }
        benchmark = Benchmark(corpus, folder, data, validation, options.max_iters)
        if options.quick:  # a short text, whose start weighs more
            benchmark.train_arguments = [
                *("--size", "nano", "--threads", "1", "--set", "context_length=32")
            ]
            benchmark.tolerance = 0.1
        if options.checkout is None:
            harness.skip("nanoGPT", "no checkout was given")
            runs = run_tgen_only(benchmark)
        else:
            nanogpt.make_workspace(options.checkout, folder, data.decode())
            train_py = (folder / "train.py").read_bytes()
            content["nanogpt_train_py_sha256"] = hashlib.sha256(train_py).hexdigest()
            runs = run_all(benchmark, options.seeds, options.long_minutes)
        for _ in runs:
            summary = summarize(benchmark.runs)
            harness.save(options, content | {"runs": benchmark.runs, "summary": summary})
        print(format_summary(summary))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    torch.manual_seed(0)
    parser = harness.make_parser(__doc__, "versus_nanogpt.json")
    parser.add_argument("checkout", metavar="NANOGPT_CHECKOUT", type=Path, nargs="?")
    parser.add_argument("corpus", metavar="CORPUS", type=Path, nargs="?", help="a UTF-8 text file")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--long-minutes", type=float, default=30.0, help="a long run (default: 30; 0: none)"
    )
    parser.add_argument(
        "--max-iters", type=int, default=nanogpt.ITERATIONS, help="nanoGPT's iterations"
    )
    quick = {"seeds": 1, "long_minutes": 0.0, "max_iters": 20}
    options = harness.parse(parser, arguments, quick)
    if options.corpus is None and not options.quick:
        parser.error("the arguments NANOGPT_CHECKOUT and CORPUS are required without --quick")
    if options.seeds < 1 or options.max_iters < 1:
        parser.error("--seeds and --max-iters must be at least 1")
    harness.run(measure, options)


if __name__ == "__main__":
    main()
