"""Measure the cost of a checkpoint: a 100 MB training state, and a plain write of the same bytes.

    python -m versus.saving.cost [--folder DIR]

Both are interleaved in the same directory, so that the disk is equally busy. The plain write is one
file, with fsync and a SHA-256 of its bytes. A state is hashed and written with its manifest, its
size is verified, its directory is published by a rename, and files and directories are synced.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint import safetensors_file
from tgen.runs import saved_state as run_state
from versus import harness

N_TENSORS = 40


def save_state(out: Path, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """Save as a training run does."""
    progress = {"step": 1, "best_step": 1}
    run_state.save_state(out, progress, arrays, run_id="r", environment={})


def write_plain(path: Path, content: bytes) -> None:
    """Write one file that survives a power loss, and hash it."""
    path.unlink(missing_ok=True)
    with open(path, "wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    hashlib.sha256(content).hexdigest()


def measure_seconds(action: Callable[[], None]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    random = np.random.default_rng(0)
    shape = (options.megabytes * 1_000_000 // N_TENSORS // 4,)
    arrays = {f"model/{i}": random.random(shape, np.float32) for i in range(N_TENSORS)}
    content = b"".join(safetensors_file.serialize_in_parts(arrays))
    seconds: dict[str, list[float]] = {"state": [], "plain": []}
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for i in range(options.rounds):
            out = folder / f"{i}"
            seconds["plain"].append(
                measure_seconds(partial(write_plain, folder / "plain", content))
            )
            seconds["state"].append(measure_seconds(partial(save_state, out, arrays)))
            shutil.rmtree(out)
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["state"] / medians["plain"]
    rows = [["", "ms", "MB/s"]]
    for name, value in medians.items():
        rows.append([name, f"{value * 1000:.0f}", f"{len(content) / value / 1e6:.0f}"])
    harness.save(
        options,
        {"bytes": len(content), "seconds": seconds, "median_seconds": medians, "ratio": ratio},
    )
    print(harness.format_table(rows))
    print(f"a state takes {ratio:.2f} times as long as a plain write")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "saving_cost.json")
    parser.add_argument("--folder", type=Path, help="directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=100)
    harness.run(measure, harness.parse(parser, arguments, {"rounds": 1, "megabytes": 1}))


if __name__ == "__main__":
    main()
