"""How well tgen learns beside nanoGPT: the same text, the same processor, the same scorer.

nanoGPT's processor recipe sets the time. tgen, with nothing but --minutes, gets a third, a quarter
and all of it. Seeds take turns, so that a machine that slows down slows everyone down:

    python benchmarks/learning/versus_nanogpt.py NANOGPT_CHECKOUT CORPUS --seeds 3 --long-minutes 30

Every process is timed from its start to its end. The table goes to stdout, progress to stderr, the
numbers to a JSON file that is rewritten after every run.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import nanogpt
import record
import tgen
from scoring import Predictor, bits_per_byte
from tgen.checkpoint import model_dir
from tgen.errors import CorpusError, TgenError, TrainingError
from tgen.model.transformer import Transformer

NANOGPT, LONG = "nanoGPT", "tgen, long"
SHARES = {"tgen, 1/3": 1 / 3, "tgen, 1/4": 1 / 4, "tgen, 1/1": 1.0}  # of nanoGPT's time
_FIRST_SEED = 1337
_HELD_OUT = 0.1
_TRIAL_MINUTES, _LEAST_MINUTES = 0.2, 0.02
_AGREEMENT = 0.002  # bits per byte, between tgen's own figure and the scorer's
_ALL_VALIDATED = 1 << 18  # of more held-out tokens tgen looks at a part: its figure is an estimate


@dataclass
class Benchmark:
    """The text, the place where models are trained, and what is known so far."""

    corpus: Path
    folder: Path
    text: bytes
    held_out: bytes  # the end of `text` that neither side trains on
    iterations: int
    overheads: list[float] = field(default_factory=list)  # seconds beyond --minutes, run by run
    runs: list[dict[str, Any]] = field(default_factory=list)

    def nanogpt_run(self, seed: int) -> dict[str, Any]:
        """nanoGPT's recipe with this seed."""
        _say(f"seed {seed}: {NANOGPT}, {self.iterations} iterations")
        command = nanogpt.command(self.folder, seed, self.iterations)
        seconds, _ = _timed(command, self.folder)
        model, described = nanogpt.load(self.folder, seed)
        return self._scored(NANOGPT, seed, seconds, model, described)

    def tgen_run(self, arm: str, seed: int, seconds: float) -> dict[str, Any]:
        """`tgen train` with the minutes that make the whole process last about `seconds`."""
        minutes = max(_LEAST_MINUTES, (seconds - median(self.overheads[-3:])) / 60)
        _say(f"seed {seed}: {arm}, {minutes:.2f} minutes")
        took, reports = self._train(minutes, seed)
        plan, done = reports["PlanReport"], reports["DoneReport"]
        model = _tgen_model(self.folder / "model")
        bits = done["best_bits_per_byte"]
        if plan["device"] != "cpu":
            raise TrainingError(f"tgen trained on {plan['device']}", "hide it: both sides use cpu")
        described = {
            "minutes": round(minutes, 4),
            "steps": done["step"],
            "best_step": done["best_step"],
            "n_parameters": plan["n_parameters"],
            "own_bits_per_byte": bits,
        }
        run = self._scored(arm, seed, took, model, described)
        whole = plan["held_out_tokens"] <= _ALL_VALIDATED
        # Of the very text that tgen held out: a few bytes fewer shift every window's border.
        own = tgen_held_out(self.text)
        check = bits_per_byte(model, self.text[: -len(own)], own)
        if whole and abs(bits - check) > _AGREEMENT:
            raise AssertionError(f"tgen says {bits}, the scorer {check}")
        return run

    def measure_overhead(self) -> None:
        """What a process takes beyond its minutes (imports, the end): a short run tells."""
        _say(f"a trial of {_TRIAL_MINUTES} minutes, for what a process takes beyond its minutes")
        self._train(_TRIAL_MINUTES, _FIRST_SEED)

    def _train(self, minutes: float, seed: int) -> tuple[float, dict[str, Any]]:
        """Seconds of the process, and the last of its reports of each kind."""
        out = self.folder / "model"
        command = [
            *(sys.executable, "-m", "tgen", "train", str(self.corpus), "--minutes", f"{minutes}"),
            *("--seed", str(seed), "--out", str(out), "--overwrite", "--quiet", "--json"),
        ]
        seconds, lines = _timed(command, self.folder)
        self.overheads.append(seconds - minutes * 60)
        return seconds, {report["kind"]: report for report in map(json.loads, lines)}

    def _scored(
        self, arm: str, seed: int, seconds: float, model: Predictor, described: Mapping[str, Any]
    ) -> dict[str, Any]:
        bits = bits_per_byte(model, self.text[: -len(self.held_out)], self.held_out)
        _say(f"  {seconds:.1f} s, {bits:.4f} bits per byte")
        run = {"arm": arm, "seed": seed, "wall_seconds": round(seconds, 2), "bits_per_byte": bits}
        run |= {"context_length": model.context_length} | dict(described)
        self.runs.append(run)
        return run


def tgen_held_out(data: bytes) -> bytes:
    """What `tgen train` holds out of one text."""
    border = round(len(data) * (1 - _HELD_OUT))
    while data[border : border + 1] and data[border] & 0xC0 == 0x80:  # inside a character
        border -= 1
    return data[border:]


def common_held_out(data: bytes) -> bytes:
    """The end of the text that both sides hold out: the shorter of two that are all but the same.

    nanoGPT counts characters, tgen bytes. Raises CorpusError if the text is not UTF-8, has several
    documents, or its characters are so uneven that the two borders lie far apart.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise CorpusError("the corpus is not UTF-8", "nanoGPT reads characters only") from None
    if "<|endoftext|>" in text:
        raise CorpusError("the corpus has several documents", "give one: nanoGPT knows no others")
    ours, theirs = tgen_held_out(data), nanogpt.held_out(text)
    apart = abs(len(ours) - len(theirs))
    if apart > max(4, len(ours) // 500):
        raise CorpusError(
            f"nanoGPT holds out {len(theirs)} bytes, tgen {len(ours)}",
            "give a text whose long characters are spread evenly",
        )
    return min(ours, theirs, key=len)


def summarise(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By arm: medians over the seeds, and each run against nanoGPT's of the same seed."""
    theirs = {run["seed"]: run for run in runs if run["arm"] == NANOGPT}
    summary = {}
    for arm in dict.fromkeys(run["arm"] for run in runs):
        mine = [run for run in runs if run["arm"] == arm]
        pairs = [(run, theirs[run["seed"]]) for run in mine]
        bits = [run["bits_per_byte"] for run in mine]
        summary[arm] = {
            "runs": len(mine),
            "wall_seconds": median(run["wall_seconds"] for run in mine),
            "share_of_time": median(a["wall_seconds"] / b["wall_seconds"] for a, b in pairs),
            "bits_per_byte": median(bits),
            "bits_per_byte_range": [min(bits), max(bits)],
            "bits_saved": median(b["bits_per_byte"] - a["bits_per_byte"] for a, b in pairs),
            "as_good_as_nanogpt": sum(a["bits_per_byte"] <= b["bits_per_byte"] for a, b in pairs),
        }
    return summary


def _table(summary: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["", "runs", "wall s", "of its time", "bits/byte", "range", "saved", "as good"]]
    for arm, row in summary.items():
        low, high = row["bits_per_byte_range"]
        rows.append(
            [
                *(arm, str(row["runs"]), f"{row['wall_seconds']:.1f}"),
                *(f"{row['share_of_time']:.2f}", f"{row['bits_per_byte']:.4f}"),
                *(f"{low:.4f}-{high:.4f}", f"{row['bits_saved']:+.4f}"),
                f"{row['as_good_as_nanogpt']} of {row['runs']}",
            ]
        )
    return record.table(rows)


def _tgen_model(path: Path) -> Predictor:
    bundle = model_dir.load(path)

    def encode(data: bytes) -> NDArray[np.int64]:
        ids = bundle.tokenizer.encode_array(data).astype(np.int64)
        assert bundle.tokenizer.decode(ids.tolist()) == data  # every byte is predicted
        return ids

    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    return Predictor(encode=encode, logits=model, context_length=bundle.config.context_length)


def _timed(command: list[str], folder: Path) -> tuple[float, list[str]]:
    """Seconds of the whole process, and the lines that it wrote; TrainingError if it failed."""
    source = str(Path(tgen.__file__).parent.parent)  # this tgen, from wherever it is run
    paths = [source, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    output, errors = folder / "stdout", folder / "stderr"
    with output.open("wb") as out, errors.open("wb") as err:
        began = time.perf_counter()
        status = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=err)
        seconds = time.perf_counter() - began
    if status.returncode != 0:
        last = errors.read_text(errors="replace").strip().splitlines()[-5:]
        raise TrainingError(f"{' '.join(command[:4])} ... failed", "\n".join(last))
    return seconds, output.read_text(encoding="utf-8").splitlines()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _runs(benchmark: Benchmark, n_seeds: int, long_minutes: float) -> Iterator[None]:
    """All runs, in alternation; every yield is a moment to save."""
    benchmark.measure_overhead()
    for number in range(n_seeds):
        seed = _FIRST_SEED + number
        theirs = benchmark.nanogpt_run(seed)["wall_seconds"]
        yield
        left = (n_seeds - number) * (1 + sum(SHARES.values())) * theirs - theirs
        _say(f"about {left / 60 + long_minutes:.0f} minutes to go")
        for arm, share in SHARES.items():
            benchmark.tgen_run(arm, seed, theirs * share)
            yield
    if long_minutes > 0:
        benchmark.tgen_run(LONG, _FIRST_SEED, long_minutes * 60)
        yield


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", metavar="NANOGPT_CHECKOUT", type=Path)
    parser.add_argument("corpus", metavar="CORPUS", type=Path, help="one file of UTF-8 text")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--long-minutes", type=float, default=30.0, help="0: no long run")
    parser.add_argument("--max-iters", type=int, default=nanogpt.ITERATIONS, help="nanoGPT's")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/versus_nanogpt.json")
    return parser.parse_args()


def _measure(arguments: argparse.Namespace) -> None:
    if arguments.seeds < 1 or arguments.max_iters < 1:
        raise TrainingError("there is nothing to measure", "--seeds and --max-iters: at least 1")
    if not arguments.corpus.is_file():
        raise CorpusError(f"{str(arguments.corpus)!r} is no file", "name one file of UTF-8 text")
    corpus = arguments.corpus.resolve()
    data = corpus.read_bytes()
    held_out = common_held_out(data)
    content = record.origin() | {
        "corpus_sha256": hashlib.sha256(data).hexdigest(),
        "corpus_bytes": len(data),
        "held_out_bytes": len(held_out),
    }
    with tempfile.TemporaryDirectory(prefix="versus-nanogpt-") as name:
        folder = Path(name)
        nanogpt.workspace(arguments.checkout, folder, data.decode())
        train_py = (folder / "train.py").read_bytes()
        content["nanogpt_train_py_sha256"] = hashlib.sha256(train_py).hexdigest()
        benchmark = Benchmark(corpus, folder, data, held_out, arguments.max_iters)
        for _ in _runs(benchmark, arguments.seeds, arguments.long_minutes):
            summary = summarise(benchmark.runs)
            record.write(
                arguments.out or record.RESULTS / "versus_nanogpt.json",
                content | {"runs": benchmark.runs, "summary": summary},
            )
        print(_table(summary))


def main() -> None:
    """Measures; an expected failure is two lines on stderr and an exit status."""
    torch.manual_seed(0)
    try:
        _measure(_arguments())
    except TgenError as error:
        _say(f"error: {error.message}\n{error.hint}")
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
