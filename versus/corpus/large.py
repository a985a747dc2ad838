"""Train on a corpus larger than memory: time and memory of tokenization and of a few steps.

    python -m versus.corpus.large --bytes 1e9 --steps 20

Writes a text of random words and trains a small model on it in a child process, which stops after
some steps and is then resumed. The run is planned long enough that the whole text is tokenized. The
peak memory is that of the process, with torch, and that of all its children together (Linux only).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tgen.machine.memory import peak_memory_bytes
from versus import harness

_MANY_STEPS = 100_000_000  # so that the plan reads the whole text
_SHAPE = {"d_model": 64, "n_layers": 2, "n_heads": 2, "context_length": 128, "batch_size": 8}


def write_corpus(folder: Path, n_bytes: int, form: str) -> Path:
    """Write lines of random words, or the same as JSON rows."""
    path = folder / f"corpus.{'jsonl' if form == 'jsonl' else 'txt'}"
    with open(path, "wb") as file:
        for block in harness.generate_text(n_bytes):
            if form == "jsonl":
                rows = [
                    {"prompt": line[:99], "completion": line[99:]}
                    for line in block.decode().splitlines()
                ]
                block = "".join(json.dumps(row) + "\n" for row in rows).encode()
            file.write(block)
    return path


def train(corpus: Path, out: Path, options: argparse.Namespace) -> None:
    """Train in this process and print the measurements as JSON."""
    start = time.perf_counter()
    from tgen import runs
    from tgen.config.training import TrainConfig
    from tgen.reports.training import PlanReport, StepReport

    results: dict[str, float | None] = {"steps": 0}
    request = runs.RunRequest(
        corpus=[str(corpus)],
        out=out,
        tokenizer=options.tokenizer,
        threads=options.threads,
        train=TrainConfig(steps=_MANY_STEPS),
        overrides={name: str(value) for name, value in _SHAPE.items()},
    )
    for report in runs.start(request, stopped=lambda: (results["steps"] or 0) >= options.steps):
        if isinstance(report, PlanReport):
            results["corpus_bytes"] = report.corpus_bytes
            results["train_tokens"] = report.train_tokens
            results["vocab_size"] = report.vocab_size
            results["seconds_to_first_step"] = round(time.perf_counter() - start, 1)
        elif isinstance(report, StepReport):
            results["steps"] = report.step
            results["last_loss"] = round(report.loss or 0.0, 3)
    results["seconds"] = round(time.perf_counter() - start, 1)
    results["peak_bytes"] = peak_memory_bytes()
    results["tokens_file_bytes"] = sum(
        file.stat().st_size for file in (out / "training").glob("tokens*")
    )
    start = time.perf_counter()
    for report in runs.resume(runs.ResumeRequest(out=out), stopped=lambda: True):
        if isinstance(report, PlanReport):
            results["seconds_to_resume"] = round(time.perf_counter() - start, 1)
    print(json.dumps(results))


def measure(options: argparse.Namespace) -> None:
    """Write the corpus, train in a child process, print and write the results."""
    with tempfile.TemporaryDirectory(prefix="tgen-large-") as name:
        folder = Path(name)
        corpus = write_corpus(folder, round(options.bytes), options.form)
        command = [sys.executable, "-m", "versus.corpus.large"]
        command += ["--train", str(corpus), str(folder / "model")]
        command += ["--steps", str(options.steps), "--tokenizer", options.tokenizer]
        if options.threads:
            command += ["--threads", str(options.threads)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, start_new_session=True, cwd=harness.ROOT
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.2)
        assert process.stdout is not None
        output = process.stdout.read()
        process.stdout.close()
        if process.returncode:
            sys.exit("error: the training process failed")
    results = json.loads(output) | {
        "form": options.form,
        "tokenizer": options.tokenizer,
        "peak_bytes_of_all_processes": peak,
    }
    harness.save(options, results)
    print(harness.format_table([["", ""], *([k, f"{v}"] for k, v in results.items())]))


def resident_bytes(ancestor: int) -> int:
    """Return the RSS of a process and its descendants; shared pages count once per process."""
    stats: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # the process has exited
            continue
        stats[int(path.parent.name)] = int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    total, family = 0, {ancestor}
    for pid in sorted(stats):  # children have larger ids, except after a wrap-around
        parent, n_bytes = stats[pid]
        if pid in family or parent in family:
            family.add(pid)
            total += n_bytes
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "large_corpus.json")
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--form", choices=["text", "jsonl"], default="text")
    parser.add_argument("--tokenizer", choices=["char", "bpe"], default="bpe")
    parser.add_argument("--train", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = harness.parse(
        parser, arguments, {"bytes": 1e5, "steps": 2, "tokenizer": "char", "threads": 1}
    )
    if options.train:
        corpus, out = options.train
        train(corpus, out, options)
    else:
        harness.run(measure, options)


if __name__ == "__main__":
    main()
