"""Measure the index of a training text: time and memory to build it, size, time per phrase.

    python -m versus.inspection.sources tinyshakespeare.txt --megabytes 100

The text consists of runs of words (geometric lengths, 8 words on average) from random places of the
given files, by default tgen's documentation. The index is built in a process of its own, whose peak
memory includes the interpreter and NumPy. A third of the phrases are copied from the text, a third
are such runs from other places, and a third are words in any order. Each has 40 words and is
searched once, with the index in the system's page cache.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tgen.corpus.text_index import open_index
from tgen.inspection.sources import find_sources
from versus import harness

_WORDS = 40  # of a phrase
_BUILD = """
import json, sys, time
from pathlib import Path
from tgen import corpus
from tgen.corpus.steps import finish
from tgen.corpus.text_index import build_index
from tgen.machine.memory import peak_memory_bytes

text = corpus.read([sys.argv[1]])
start = time.perf_counter()
new = finish(build_index(text.documents, text.sha256, lambda name: Path(name).name))
new.save(Path(sys.argv[2]))
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "peak": peak_memory_bytes()}))
"""


def vary(words: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """Yield runs of words from random places, without end."""
    while True:
        start, length = rng.randrange(len(words)), 1
        while rng.random() < 7 / 8:
            length += 1
        yield b"".join(words[start : start + length])


def write_text(path: Path, words: Sequence[bytes], n_bytes: int) -> None:
    """Write a text of this size."""
    runs, n_written = vary(words, random.Random(0)), 0
    with open(path, "wb") as file:
        while n_written < n_bytes:
            n_written += file.write(next(runs)[: n_bytes - n_written])


def make_phrases(text: Path, words: Sequence[bytes], n: int) -> list[bytes]:
    """Return copied, recombined and random phrases."""
    rng, content = random.Random(1), text.read_bytes()
    phrases = []
    for i in range(n):
        if i % 3 == 0:
            start = rng.randrange(max(1, len(content) - 2000))
            found = re.findall(rb"\S+\s*", content[start : start + 2000])[1 : _WORDS + 1]
        elif i % 3 == 1:
            runs = vary(words, rng)
            found = re.findall(rb"\S+\s*", b"".join(next(runs) for _ in range(_WORDS)))[:_WORDS]
        else:
            found = rng.choices(words, k=_WORDS)
        phrases.append(b"".join(found).strip())
    return phrases


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    files = options.texts or sorted((harness.ROOT / "docs").glob("*.md"))
    words = re.findall(rb"\S+\s*", b"\n".join(file.read_bytes() for file in files))
    n_bytes = round(options.megabytes * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        text, path = Path(folder) / "text.txt", Path(folder) / "text.index"
        write_text(text, words, n_bytes)
        command = [sys.executable, "-c", _BUILD, str(text), str(path)]
        built = json.loads(harness.run_process(command))
        start = time.perf_counter()
        index = open_index(path)
        open_ms = (time.perf_counter() - start) * 1e3
        assert index is not None
        milliseconds, covered = [], []
        for phrase in make_phrases(text, words, options.phrases):
            start = time.perf_counter()
            report = find_sources(index, phrase)
            milliseconds.append((time.perf_counter() - start) * 1e3)
            covered.append(report.n_covered / len(phrase))
        assert min(covered[::3]) == 1  # copies are found whole
        results = {
            "text, MB": n_bytes / 1e6,
            "build, seconds": built["seconds"],
            "build, peak memory, MB": (built["peak"] or 0) / 1e6,
            "index, bytes per byte of text": path.stat().st_size / n_bytes,
            "open, ms": open_ms,
            "phrase, ms, median": float(np.median(milliseconds)),
            "phrase, ms, 99th percentile": float(np.percentile(milliseconds, 99)),
            "phrase, ms, maximum": max(milliseconds),
        }
    harness.save(options, {"results": results})
    print(harness.format_table([["", ""], *([n, f"{v:.2f}"] for n, v in results.items())]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "sources.json")
    parser.add_argument("texts", nargs="*", type=Path, help="files whose words make the text")
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--phrases", type=int, default=300)
    options = harness.parse(parser, arguments, {"megabytes": 0.3, "phrases": 9})
    harness.run(measure, options)


if __name__ == "__main__":
    main()
