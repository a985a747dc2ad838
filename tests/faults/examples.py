"""Tests on random examples, with examples that differ from those of every other run.

    python tests/faults/examples.py [--long | COUNT]

The tests themselves use the same examples every time. This script repeats those that hypothesis
makes examples for; a failure prints how to reproduce its example.
"""

import os
import subprocess
import sys
from pathlib import Path

import tiny


def main() -> int:
    """Repeat the tests `count` times."""
    count = tiny.count(__doc__, short=1, long=20)
    folder = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", "-p", "no:cacheprovider"]
    environment = os.environ | {"TGEN_FRESH_EXAMPLES": "1"}
    n_failed = 0
    for _ in range(count):
        result = subprocess.run([*command, folder], env=environment, capture_output=True)
        if result.returncode:
            n_failed += 1
            sys.stderr.buffer.write(result.stdout + result.stderr)
    print(f"{count:,} times the random tests with new examples: {n_failed} failed")
    return int(bool(n_failed))


if __name__ == "__main__":
    sys.exit(main())
