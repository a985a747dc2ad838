"""Does a text larger than the memory train? Its tokenising and some steps, measured from outside.

Makes a text of random words, drawn as unevenly as a language's, and trains a small model on it in a
process of its own, which is asked to stop after some steps. The run is planned as so long a one
that all of the text is tokenised. Peak memory is the process's own, torch included, and that of all
that it starts to tokenise together.

    python benchmarks/corpus/large.py --bytes 1e9 --steps 20 > benchmarks/results/large_corpus.json
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_WORDS_AT_ONCE = 100_000
_ENOUGH_STEPS = 100_000_000  # to read all of the text: none of it is left out
_SHAPE = {"d_model": 64, "n_layers": 2, "n_heads": 2, "context_length": 128, "batch_size": 8}


def text(n_bytes: int, form: str) -> Iterator[bytes]:
    """Lines of words, or the same as rows of JSON, in blocks."""
    random = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgk", np.uint8)
    words = [bytes(random.choice(letters, random.integers(2, 11))).decode() for _ in range(50_000)]
    words += ["naïve", "日本", "été"]
    share = 1 / np.arange(1, len(words) + 1)
    share /= share.sum()
    made = 0
    while made < n_bytes:
        drawn = random.choice(len(words), _WORDS_AT_ONCE, p=share).tolist()
        lines = [" ".join(words[i] for i in drawn[n : n + 40]) for n in range(0, len(drawn), 40)]
        if form == "jsonl":
            lines = [json.dumps({"prompt": line[:99], "completion": line[99:]}) for line in lines]
        block = ("\n".join(lines) + "\n").encode()
        yield block
        made += len(block)


def train(corpus: Path, out: Path, steps: int, kind: str) -> None:
    """Trains in this process, and prints what it took as JSON."""
    import resource

    began = time.perf_counter()
    from tgen import runs
    from tgen.config import TrainConfig
    from tgen.reports import PlanReport, StepReport

    taken = [0]  # steps
    request = runs.RunRequest(
        corpus=[str(corpus)],
        out=out,
        tokenizer=kind,
        train=TrainConfig(steps=_ENOUGH_STEPS),
        overrides={name: str(value) for name, value in _SHAPE.items()},
    )
    found: dict[str, float] = {}
    for report in runs.start(request, stopped=lambda: taken[0] >= steps):
        if isinstance(report, PlanReport):
            found["corpus_bytes"] = report.corpus_bytes
            found["train_tokens"] = report.train_tokens
            found["vocab_size"] = report.vocab_size
            found["seconds_to_the_first_step"] = round(time.perf_counter() - began, 1)
        elif isinstance(report, StepReport):
            taken[0] = report.step
            found["last_loss"] = round(report.loss or 0.0, 3)
    found["steps"] = taken[0]
    found["seconds"] = round(time.perf_counter() - began, 1)
    scale = 1 if sys.platform == "darwin" else 1024
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    found["tokens_file_bytes"] = (out / "training" / "tokens.safetensors").stat().st_size
    began = time.perf_counter()
    for report in runs.resume(runs.ResumeRequest(out=out), stopped=lambda: True):
        if isinstance(report, PlanReport):
            found["seconds_to_resume"] = round(time.perf_counter() - began, 1)
    print(json.dumps(found))


def main() -> None:
    """Makes the text, trains in another process, prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--form", choices=["text", "jsonl"], default="text")
    parser.add_argument("--tokenizer", choices=["char", "bpe"], default="bpe")
    parser.add_argument("--train", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*options.train, options.steps, options.tokenizer)
        return
    with tempfile.TemporaryDirectory(prefix="tgen-large-") as folder:
        corpus = Path(folder) / f"corpus.{'jsonl' if options.form == 'jsonl' else 'txt'}"
        with open(corpus, "wb") as file:
            file.writelines(text(round(options.bytes), options.form))
        command = [sys.executable, __file__, "--train", str(corpus), str(Path(folder) / "model")]
        command += ["--steps", str(options.steps), "--tokenizer", options.tokenizer]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.2)
        assert process.stdout
        if process.returncode:
            sys.exit("the run failed")
        found = json.loads(process.stdout.read())
        found["peak_bytes_of_all_processes"] = peak
    machine = {"processors": os.cpu_count(), "python": platform.python_version()}
    asked = {"form": options.form, "tokenizer": options.tokenizer}
    print(json.dumps({"command": sys.argv, **machine, **asked, **found}, indent=2))


def resident_bytes(ancestor: int) -> int:
    """What a process and all that it started have in memory; what they share counts for each."""
    stats: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended meanwhile
            continue
        stats[int(path.parent.name)] = int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    total, family = 0, {ancestor}
    for pid in sorted(stats):  # who is started later has a larger number, but for an overflow
        parent, n_bytes = stats[pid]
        if pid in family or parent in family:
            family.add(pid)
            total += n_bytes
    return total


if __name__ == "__main__":
    main()
