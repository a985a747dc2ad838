"""Command-line options, result files, tables and generated text: what all benchmarks share."""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tgen
from tgen.errors import TgenError
from tgen.machine.description import describe_machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "versus" / "results"
_WORDS_PER_BLOCK = 100_000


def make_parser(description: str, result: str) -> argparse.ArgumentParser:
    """Return a parser with --quick and --out; `result` is the default file in results/."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="test the script in a few seconds: tiny sizes, missing tools are skipped, no result "
        "file without --out",
    )
    parser.add_argument("--out", type=Path, help=f"result file (default: results/{result})")
    parser.set_defaults(result=result)
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse the arguments; with --quick, `quick` replaces the defaults of options."""
    options = parser.parse_args(arguments)
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args(arguments)
    return options


def save(options: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write the result file with the environment; with --quick only to --out."""
    path = options.out or (None if options.quick else RESULTS / options.result)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(_environment() | content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def skip(name: str, reason: str) -> None:
    """Report on stderr that a tool or measurement is left out."""
    print(f"skipped: {name} ({reason})", file=sys.stderr, flush=True)


def run(measure: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Call `measure`; an expected failure prints two lines and sets the exit status."""
    try:
        measure(options)
    except TgenError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_status)


def run_process(command: Sequence[str], **options: Any) -> bytes:
    """Return the output of a process; raises TgenError with its last stderr lines if it fails."""
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        command, capture_output=True, check=False, **options
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()[-5:]
        message = f"`{shlex.join(command)}` exited with {done.returncode}"
        raise TgenError("\n".join([message, *lines]), "run this command to see the error")
    return done.stdout


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns, the first to the left, the others to the right; the first row is a header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def generate_text(n_bytes: int) -> Iterator[bytes]:
    """Yield blocks of lines of random words, with frequencies as uneven as a language's (Zipf)."""
    words, random = deepcopy(_make_words())
    probabilities = 1 / np.arange(1, len(words) + 1)
    probabilities /= probabilities.sum()
    n_written = 0
    while n_written < n_bytes:
        n = min(_WORDS_PER_BLOCK, (n_bytes - n_written) // 4 + 1)
        ids = random.choice(len(words), n, p=probabilities).tolist()
        lines = [" ".join(words[i] for i in ids[k : k + 40]) for k in range(0, len(ids), 40)]
        block = ("\n".join(lines) + "\n").encode()
        yield block
        n_written += len(block)


@cache
def _make_words() -> tuple[list[str], np.random.Generator]:
    """Return random words, and the generator of random numbers after them."""
    random = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgk", np.uint8)
    words = [bytes(random.choice(letters, random.integers(2, 11))).decode() for _ in range(50_000)]
    return [*words, "naïve", "日本", "été"], random


def write_text(path: Path, n_bytes: int) -> Path:
    """Write generated text to a file."""
    path.write_bytes(b"".join(generate_text(n_bytes)))
    return path


def _environment() -> dict[str, Any]:
    script = Path(sys.argv[0]).resolve()
    name = sys.argv[0]
    if script.is_relative_to(ROOT / "versus"):
        name = f"-m {'.'.join(script.relative_to(ROOT).with_suffix('').parts)}"
    return {
        "command": f"python {name} {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": describe_machine().cpu,
            "system": platform.system(),
            "threads": torch.get_num_threads(),
        },
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tgen": tgen.__version__,
    }
