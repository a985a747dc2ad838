"""Hostile files, rows, flags and requests: each is refused with an error, or it works.

    python tests/fuzz [--long | COUNT] [--format NAME] [--seed S] [--first I] [--case I] [--jobs J]

Valid inputs, changed in one place or in several, are read as the commands read them. A crash, a
hang, another exception, memory, a write elsewhere, a warning or a control character on the terminal
is a finding, which is printed with the options that repeat it. The short form has a fixed seed, the
long form a new one.
"""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy: a process with threads cannot be forked
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import secrets
import sys
import time
from pathlib import Path

_tests = Path(__file__).parents[1]
sys.path[:0] = [str(_tests), str(_tests / "faults")]

from fuzz.formats import FORMATS, WEIGHTS
from fuzz.runner import Chunk, Totals, run
from tgen.engine.choose_engine import missing_kernels
from tgen.engine.cpu.kernel_cache import DEFAULTS, load_kernels

_LONG = 1_000_000
_SHORT = 12  # cases of each format, and 4 per unit of its weight
_CHUNK = 2000  # cases per process


def main() -> int:
    """Run the cases, print the findings, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", help="cases; some 800 by default")
    parser.add_argument("--long", action="store_true", help=f"{_LONG:,} cases of a new seed")
    parser.add_argument("--format", action="append", choices=sorted(FORMATS), help="repeatable")
    parser.add_argument("--seed", type=int, help="0 by default")
    parser.add_argument("--first", type=int, default=0, help="number of cases to skip")
    parser.add_argument("--case", type=int, help="only this case of --format")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options = parser.parse_args()
    seed = options.seed
    if seed is None:
        seed = secrets.randbelow(1 << 32) if options.long else 0
    names = options.format or list(FORMATS)
    count = options.count or (_LONG if options.long else 0)
    chunks = [
        Chunk(name, i, min(i + _CHUNK, end))
        for name, (first, end) in _ranges(names, options.first, count, options.case).items()
        for i in range(first, end, _CHUNK)
    ]
    missing_kernels()  # before the forks, so that no case compiles or loads them
    load_kernels(*DEFAULTS)
    began = time.monotonic()
    totals = run(
        FORMATS,
        chunks,
        seed=seed,
        jobs=options.jobs,
        on_finding=lambda finding: print(finding, flush=True),
    )
    return _summarize(totals, seed, time.monotonic() - began)


def _ranges(
    names: list[str], first: int, count: int, case: int | None
) -> dict[str, tuple[int, int]]:
    """Return the first case and the end of each format: a share of `count` by its weight."""
    if case is not None:
        return dict.fromkeys(names, (case, case + 1))
    if not count:
        return {name: (0, _SHORT + 4 * WEIGHTS[name]) for name in names}
    total = sum(WEIGHTS[name] for name in names)
    ends = (first, first + count)
    return {name: tuple(end * WEIGHTS[name] // total for end in ends) for name in names}  # type: ignore[misc]


def _summarize(totals: dict[str, Totals], seed: int, seconds: float) -> int:
    for name, total in totals.items():
        milliseconds = total.seconds / max(1, total.cases) * 1000
        print(
            f"{name}: {total.cases:,} cases, {total.accepted:,} accepted, "
            f"{milliseconds:.1f} ms each, at most {total.slowest:.2f} s "
            f"(case {total.slowest_case}), {len(total.findings)} findings"
        )
    n_cases = sum(total.cases for total in totals.values())
    n_findings = sum(len(total.findings) for total in totals.values())
    print(
        f"{n_cases:,} cases, {n_cases / seconds:,.0f} per second, seed {seed}: "
        f"{n_findings} findings"
    )
    return int(n_findings > 0 or not n_cases)


if __name__ == "__main__":
    sys.exit(main())
